"""Generates samples from prompts: in the slots of one engine, or on scheduled workers."""
