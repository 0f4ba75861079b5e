"""Checks between settings, made before a command starts."""
