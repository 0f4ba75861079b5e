"""Computes logprobs and values of the tokens of samples, for one role at a time."""
