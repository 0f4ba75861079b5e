"""Length buckets, which limit the number of compiled shapes."""

from __future__ import annotations


def bucket_length(length: int, *, min_bucket: int = 16) -> int:
    """Returns the smallest of 1, 1.5, 2, 3, 4, 6, 8, ... times `min_bucket` that is at least `length`."""
    size = min_bucket
    while size < length:
        size *= 2
    between = size * 3 // 4
    return between if min_bucket < between and length <= between else size
