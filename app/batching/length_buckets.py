"""Small fixed ladders of lengths, so that few shapes are ever compiled."""

from __future__ import annotations


def bucket_length(length: int, *, min_bucket: int = 16) -> int:
    """The first of 1, 1.5, 2, 3, 4, 6, 8, ... times `smallest` that holds `length`: at most a third is padding."""
    size = min_bucket
    while size < length:
        size *= 2
    between = size * 3 // 4
    return between if min_bucket < between and length <= between else size
