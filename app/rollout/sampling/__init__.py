"""Draws tokens from logits: noise that only the token decides, and truncation."""
