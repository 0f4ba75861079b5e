"""Samples tokens from logits with reproducible PRNG keys, and truncates distributions by top-k, top-p and min-p."""
