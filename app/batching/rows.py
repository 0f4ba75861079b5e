"""Segments -> rows that are as full as possible and never over their length."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from app.batching.karmarkar_karp import karmarkar_karp


class Item(NamedTuple):
    """Samples behind one prompt. Sorts by size, then by its first sample."""

    size: int
    members: tuple[int, ...]
    prompt: int
    """Tokens of the prompt."""


class Shelf:
    """The items of one host that have no row yet."""

    def __init__(self, items: Sequence[Item]):
        self.items = sorted(items)
        self.num_tokens = sum(item.size for item in items)

    def copy(self) -> Shelf:
        return Shelf(self.items)

    def fill(self, length: int) -> list[Item]:
        """Takes items off the shelf for one row: the largest that fits, again and again."""
        row: list[Item] = []
        left = length
        while (i := bisect_right(self.items, left, key=lambda item: item.size)) > 0:
            item = self.items.pop(i - 1)
            row.append(item)
            left -= item.size
        self.num_tokens -= length - left
        return row


def fill_all(shelf: Shelf, *, num_rows: int, length: int) -> list[list[Item]] | None:
    """Everything that is on the shelf in `num_rows` rows, or None. The shelf stays as it is."""
    if shelf.num_tokens > num_rows * length:
        return None
    rest = shelf.copy()
    rows = []
    for _ in range(num_rows):
        if not rest.items:
            break
        rows.append(rest.fill(length))
    return None if rest.items else rows


def partition(shelf: Shelf, *, num_rows: int, length: int) -> list[list[Item]] | None:
    """The same by Karmarkar-Karp: rows of even lengths, or None where one would be over `length`."""
    if shelf.num_tokens > num_rows * length:
        return None
    parts = karmarkar_karp([item.size for item in shelf.items], num_rows)
    rows = [[shelf.items[i] for i in part] for part in parts if part]
    return rows if all(sum(item.size for item in row) <= length for row in rows) else None
