"""Adapters that are mounted beside a model and chosen row by row."""
