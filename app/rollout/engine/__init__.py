"""Continuous batching: rows enter and leave slots over a paged KV cache."""
