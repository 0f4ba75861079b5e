"""A model on a mesh, ready to generate and to score: what training, stages, evaluation and export share."""
