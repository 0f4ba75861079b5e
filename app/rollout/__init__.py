"""Generates samples from prompts: with one slot engine, or with several workers under a scheduler."""
