"""Generates samples from prompts: whole batches at once, in slots, and on scheduled workers."""
