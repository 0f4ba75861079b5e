"""Reward functions, which grade samples on the host without JAX."""
