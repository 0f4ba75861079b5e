"""Saves, restores and retains the state of a run; loads saved policies for other commands."""
