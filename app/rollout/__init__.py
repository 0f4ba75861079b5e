"""Generates samples from prompts: sampling, batch and slot engines, workers and their scheduling."""
