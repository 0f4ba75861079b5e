"""Several slot engines under one scheduler: workers, what drives them, and rollouts that run during training."""
