"""How the one-file executable is made. Run from a checkout by `make binary`; no part of the installed program."""
