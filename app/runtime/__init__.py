"""A model on a mesh, ready to generate and to score: shared by training, stages, evaluation and export."""
