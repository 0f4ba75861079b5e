"""Scheduling of samples on workers: a state machine without jax, clock, threads or randomness."""
