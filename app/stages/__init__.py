"""Implements the commands that process files of samples: rollout, score and gae."""
