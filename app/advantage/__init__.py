"""Computes advantages of samples and tokens from rewards and values."""
