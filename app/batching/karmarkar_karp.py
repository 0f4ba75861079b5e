"""The largest differencing method, which splits numbers into k parts with similar sums.

Source: Karmarkar and Karp (1982), "The Differencing Method of Set Partitioning".
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple


class _Part(NamedTuple):
    """A part of a partition; ordered by sum, then by count, then by members."""

    sum: float
    count: int
    members: tuple[int, ...]


def karmarkar_karp(weights: Sequence[float], num_parts: int, *, equal_sizes: bool = False) -> list[list[int]]:
    """Returns `num_parts` sorted lists of indices with similar sums, the largest sum first.

    Each partial partition starts with one index or, if `equal_sizes`, with `num_parts` neighbors of the sorted weights.
    The two with the largest spread are merged, the largest part of one with the smallest of the other, until only one
    is left.

    Args:
        equal_sizes: whether all parts have the same number of indices.

    Raises:
        ValueError: `equal_sizes` is set, but the number of weights is not a multiple of `num_parts`.
    """
    order = sorted(range(len(weights)), key=lambda i: (weights[i], i))
    step = num_parts if equal_sizes else 1
    if len(order) % step:
        raise ValueError(f"{len(order)} weights cannot be split into {num_parts} parts of equal sizes")
    heap = []
    for first in range(0, len(order), step):
        parts = [_Part(weights[i], 1, (i,)) for i in order[first : first + step]]
        heapq.heappush(heap, _entry(parts, num_parts))
    while len(heap) > 1:
        *_, one = heapq.heappop(heap)
        *_, other = heapq.heappop(heap)
        heapq.heappush(heap, _entry(_merge_partitions(one, other, num_parts), num_parts))
    parts = heap[0][-1] if heap else []
    return [sorted(part.members) for part in reversed(parts)] + [[] for _ in range(num_parts - len(parts))]


_Partition = list[_Part]
"""Smallest part first; empty parts are left out."""


def _entry(parts: _Partition, num_parts: int) -> tuple[float, float, tuple[int, ...], _Partition]:
    """Returns a heap entry that sorts by largest spread, then by the largest part's sum, then by its members."""
    smallest = parts[0].sum if len(parts) == num_parts else 0
    return (smallest - parts[-1].sum, -parts[-1].sum, parts[-1].members, parts)


def _merge_partitions(one: _Partition, other: _Partition, num_parts: int) -> _Partition:
    """Merges the i-th largest part of one with the i-th smallest of the other; may modify both lists."""
    both = max(0, len(one) + len(other) - num_parts)
    joined = [
        _Part(a.sum + b.sum, a.count + b.count, a.members + b.members)
        for a, b in zip(one[:both], reversed(other[:both]), strict=True)
    ]
    if len(other) > 1:
        return sorted(one[both:] + other[both:] + joined)
    # Most merges add one part to many, which needs no sorting.
    del one[:both]
    insort(one, (joined or other)[0])
    return one
