"""Evaluation on held-out prompts, during training or standalone: accuracy, pass@k, intervals, comparison of results."""
