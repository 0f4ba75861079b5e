"""Checks that involve several settings, run before a command starts."""
