"""Saves, restores and retains the state of a run; reads checkpoints for others."""
