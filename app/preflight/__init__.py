"""Checks before a run: whether it can start, whether it fits, and how its weights and rows are placed."""
