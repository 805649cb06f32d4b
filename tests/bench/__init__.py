"""Figures for docs/log.md: run by hand, never part of the tests."""
