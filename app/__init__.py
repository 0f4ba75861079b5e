"""Rooms of the training pipeline: rollout -> reward -> score -> advantage -> update."""
