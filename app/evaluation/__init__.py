"""Accuracy, pass@k and their intervals on held-out prompts, in training and on their own; comparison of two results."""
