"""Small fixed ladders of lengths, so that few shapes are ever compiled."""

from __future__ import annotations


def rung(length: int, *, smallest: int = 16) -> int:
    """The first of 1, 1.5, 2, 3, 4, 6, 8, ... times `smallest` that holds `length`: at most a third is padding."""
    size = smallest
    while size < length:
        size *= 2
    between = size * 3 // 4
    return between if smallest < between and length <= between else size
