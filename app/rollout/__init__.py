"""token ids -> samples: the sampling rules and the synchronous generation engine."""
