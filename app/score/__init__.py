"""Computes the logprobs and values of given samples for one role."""
