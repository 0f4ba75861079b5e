"""Several slot engines under one scheduler: workers, their threads, and rollouts during training."""
