"""Pipeline stages as commands over a file of samples: rollout, score and gae."""
