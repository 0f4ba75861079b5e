"""Attention over dense masks, packed rows and caches."""
