"""The batch-native engine: rows, ticks and events; it knows no HTTP and no terminal."""

from engine import imports

imports.install()
