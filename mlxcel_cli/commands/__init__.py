"""One file per group of commands; nothing heavy is imported before a command runs."""
