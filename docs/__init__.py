"""The documents: the pages that repeat the code are written by `generate.py`, the site by `build.py`."""
