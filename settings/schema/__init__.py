"""Defines every setting with its type, default, bounds and help text; related sections share a file."""
