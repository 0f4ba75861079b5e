"""Samples tokens from logits with reproducible PRNG keys, optionally truncated by top-k, top-p and min-p."""
