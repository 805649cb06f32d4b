"""Checkpoints: where they lie, how they get there, how they are loaded."""
