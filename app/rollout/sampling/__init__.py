"""Samples tokens from logits with reproducible noise, and truncates distributions by top-k, top-p and min-p."""
