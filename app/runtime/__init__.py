"""Prepares a model on a mesh for generation and scoring, for training, stages, evaluation and export."""
