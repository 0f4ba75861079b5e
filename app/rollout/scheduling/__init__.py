"""Scheduling of samples on workers: a state machine without JAX, clocks, threads or randomness."""
