"""How many micro-batches of which shapes hold the items of all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from app.batching.bin_packing import ItemRow, Shelf, fill_all, spread_all

TAIL_SHARES = tuple(Fraction(n, 16) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))
"""Shares of the quota that micro-batches may have: few, since each is a shape to compile."""
BLOCK = 128
"""Rows are whole blocks of so many tokens where they are longer: what attention kernels work in."""


class Shape(NamedTuple):
    """What each device computes of a micro-batch."""

    rows_per_device: int
    num_tokens: int
    """Of a row."""

    @property
    def tokens_per_device(self) -> int:
        return self.rows_per_device * self.num_tokens


class Block(NamedTuple):
    """Micro-batches of one shape, and each host's rows in them, not yet dealt. No host has more than slots."""

    shape: Shape
    num_micro_batches: int
    rows_of_host: Sequence[Sequence[ItemRow]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Blocks, one after another, that hold everything."""

    blocks: tuple[Block, ...]

    @property
    def num_micro_batches(self) -> int:
        return sum(block.num_micro_batches for block in self.blocks)

    @property
    def cost(self) -> tuple[int, int]:
        """Tokens that each device computes, then tokens laid out."""
        return (
            sum(block.num_micro_batches * block.shape.tokens_per_device for block in self.blocks),
            sum(item.size for block in self.blocks for rows in block.rows_of_host for row in rows for item in row),
        )

    def in_full_shape(self, full: Shape, count: int) -> Fit:
        """The same rows, all in the full shape, over `count` micro-batches."""
        hosts = zip(*(block.rows_of_host for block in self.blocks), strict=True)
        return Fit((Block(full, count, [[row for rows in host for row in rows] for host in hosts]),))


def ladder(max_tokens_per_device: int, row_length: int) -> list[Shape]:
    """Shapes a micro-batch may have, smallest first: fewer rows, then one shorter row. The last is the full one."""

    def shape(num_tokens: int) -> Shape:
        if num_tokens >= row_length:
            return Shape(num_tokens // row_length, row_length)
        return Shape(1, whole_blocks(num_tokens))

    shapes = {shape(max(1, int(max_tokens_per_device * share))) for share in TAIL_SHARES}
    return sorted(shapes, key=lambda shape: shape.tokens_per_device)


def whole_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK * BLOCK or num_tokens


def fewest(shelves: Sequence[Shelf], shapes: Sequence[Shape], num_devices: int, *, even_tail: bool) -> Fit:
    """As few micro-batches as rows can be filled for: full ones, and a tail of the smallest shape for what is left.

    Args:
        num_devices: of each host.
        even_tail: the tail's rows have even lengths, not the first as full as possible.
    """
    full = shapes[-1]
    shelves = [shelf.copy() for shelf in shelves]
    rows: list[list[ItemRow]] = [[] for _ in shelves]
    num_full = 0
    to_fill = max(lower_bound(shelves, full, num_devices) - 1, 0)
    while True:
        for shelf, filled in zip(shelves, rows, strict=True):
            slots = to_fill * num_devices * full.rows_per_device
            while shelf.items and slots:
                filled.append(shelf.fill(full.num_tokens))
                slots -= 1
        num_full += to_fill
        for shape in shapes:
            tails = _tails(shelves, shape, num_devices, even=even_tail)
            if tails is not None:
                blocks = (Block(full, num_full, rows), Block(shape, 1, tails))
                return Fit(blocks if num_full else blocks[1:])
        to_fill = 1


def _tails(shelves: Sequence[Shelf], shape: Shape, num_devices: int, *, even: bool) -> list[list[ItemRow]] | None:
    limits = {"num_rows": num_devices * shape.rows_per_device, "length": shape.num_tokens}
    tails = []
    for shelf in shelves:
        rows = spread_all(shelf.items, **limits) if even else None
        rows = fill_all(shelf, **limits) if rows is None else rows
        if rows is None:
            return None
        tails.append(rows)
    return tails


def evenly(shelves: Sequence[Shelf], shapes: Sequence[Shape], num_devices: int, *, count: int) -> Fit | None:
    """`count` micro-batches of the smallest shape that holds rows of even lengths, if any does."""
    for shape in shapes:
        limits = {"num_rows": count * num_devices * shape.rows_per_device, "length": shape.num_tokens}
        rows = []
        for shelf in shelves:
            spread = spread_all(shelf.items, **limits)
            if spread is None:
                break
            rows.append(spread)
        if len(rows) == len(shelves):
            return Fit((Block(shape, count, rows),))
    return None


def lower_bound(shelves: Sequence[Shelf], full: Shape, num_devices: int) -> int:
    """Micro-batches without which not even the tokens of the fullest host have a place."""
    most = max(shelf.num_tokens for shelf in shelves)
    return -(-most // (num_devices * full.tokens_per_device))
