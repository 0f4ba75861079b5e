"""Several slot engines under one scheduler: workers, their threads, and asynchronous rollouts."""
