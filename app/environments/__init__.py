"""Environments and tools that a policy talks to over several turns, played in processes without JAX."""
