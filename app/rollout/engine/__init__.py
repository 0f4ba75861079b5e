"""Continuous batching: rows that come and go in slots over a cache of blocks."""
