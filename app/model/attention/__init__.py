"""Computes attention with dense masks, over packed rows, and over the KV cache."""
