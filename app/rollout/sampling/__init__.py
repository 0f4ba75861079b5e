"""Samples tokens from logits, with noise keyed by token, and truncation."""
