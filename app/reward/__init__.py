"""Samples to floats, on the host, without jax."""
