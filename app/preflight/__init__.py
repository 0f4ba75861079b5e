"""Checks before a run: whether it can start and fits in memory, and where its weights and rows are placed."""
