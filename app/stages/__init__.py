"""One stage of the pipeline over a file of samples: rollout, score or gae."""
