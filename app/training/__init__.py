"""Runs training: setup, initial state, steps, the loop over steps, and replay of saved samples."""
