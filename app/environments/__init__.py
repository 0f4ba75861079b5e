"""Multi-turn environments and tools, run in processes without JAX."""
