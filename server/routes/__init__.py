"""One file per surface: a dialect in, the one generation path, the dialect out."""
