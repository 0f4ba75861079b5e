"""How many micro-batches of which shapes hold the items of all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from app.batching.bin_packing import PackingRow, RowPacker, pack_all, pack_all_evenly

TAIL_FRACTIONS = tuple(Fraction(n, 16) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))
"""Shares of the quota that micro-batches may have: few, since each is a shape to compile."""
BLOCK_TOKENS = 128
"""Rows are whole blocks of so many tokens where they are longer: what attention kernels work in."""


class MicroBatchShape(NamedTuple):
    """What each device computes of a micro-batch."""

    rows_per_device: int
    row_length: int
    """Of a row."""

    @property
    def tokens_per_device(self) -> int:
        return self.rows_per_device * self.row_length


class ShapeGroup(NamedTuple):
    """Micro-batches of one shape, and each host's rows in them, not yet dealt. No host has more than slots."""

    shape: MicroBatchShape
    num_micro_batches: int
    rows_by_host: Sequence[Sequence[PackingRow]]


@dataclass(frozen=True, slots=True)
class Packing:
    """Blocks, one after another, that hold everything."""

    shape_groups: tuple[ShapeGroup, ...]

    @property
    def num_micro_batches(self) -> int:
        return sum(block.num_micro_batches for block in self.shape_groups)

    @property
    def cost(self) -> tuple[int, int]:
        """Tokens that each device computes, then tokens laid out."""
        return (
            sum(block.num_micro_batches * block.shape.tokens_per_device for block in self.shape_groups),
            sum(
                item.num_tokens
                for block in self.shape_groups
                for rows in block.rows_by_host
                for row in rows
                for item in row
            ),
        )

    def to_full_shape(self, full: MicroBatchShape, count: int) -> Packing:
        """The same rows, all in the full shape, over `count` micro-batches."""
        hosts = zip(*(block.rows_by_host for block in self.shape_groups), strict=True)
        return Packing((ShapeGroup(full, count, [[row for rows in host for row in rows] for host in hosts]),))


def candidate_shapes(max_tokens_per_device: int, row_length: int) -> list[MicroBatchShape]:
    """Shapes a micro-batch may have, smallest first: fewer rows, then one shorter row. The last is the full one."""

    def shape(num_tokens: int) -> MicroBatchShape:
        if num_tokens >= row_length:
            return MicroBatchShape(num_tokens // row_length, row_length)
        return MicroBatchShape(1, round_down_to_blocks(num_tokens))

    shapes = {shape(max(1, int(max_tokens_per_device * share))) for share in TAIL_FRACTIONS}
    return sorted(shapes, key=lambda shape: shape.tokens_per_device)


def round_down_to_blocks(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS or num_tokens


def pack_into_fewest(
    packers: Sequence[RowPacker], shapes: Sequence[MicroBatchShape], num_devices: int, *, even_tail: bool
) -> Packing:
    """As few micro-batches as rows can be filled for: full ones, and a tail of the smallest shape for what is left.

    Args:
        num_devices: of each host.
        even_tail: the tail's rows have even lengths, not the first as full as possible.
    """
    full = shapes[-1]
    packers = [shelf.copy() for shelf in packers]
    rows: list[list[PackingRow]] = [[] for _ in packers]
    num_full = 0
    to_fill = max(min_micro_batches(packers, full, num_devices) - 1, 0)
    while True:
        for shelf, filled in zip(packers, rows, strict=True):
            slots = to_fill * num_devices * full.rows_per_device
            while shelf.items and slots:
                filled.append(shelf.pack_row(full.row_length))
                slots -= 1
        num_full += to_fill
        for shape in shapes:
            tails = _pack_tails(packers, shape, num_devices, even_lengths=even_tail)
            if tails is not None:
                blocks = (ShapeGroup(full, num_full, rows), ShapeGroup(shape, 1, tails))
                return Packing(blocks if num_full else blocks[1:])
        to_fill = 1


def _pack_tails(
    packers: Sequence[RowPacker], shape: MicroBatchShape, num_devices: int, *, even_lengths: bool
) -> list[list[PackingRow]] | None:
    limits = {"num_rows": num_devices * shape.rows_per_device, "length": shape.row_length}
    tails = []
    for shelf in packers:
        rows = pack_all_evenly(shelf.items, **limits) if even_lengths else None
        rows = pack_all(shelf, **limits) if rows is None else rows
        if rows is None:
            return None
        tails.append(rows)
    return tails


def pack_evenly(
    packers: Sequence[RowPacker], shapes: Sequence[MicroBatchShape], num_devices: int, *, count: int
) -> Packing | None:
    """`count` micro-batches of the smallest shape that holds rows of even lengths, if any does."""
    for shape in shapes:
        limits = {"num_rows": count * num_devices * shape.rows_per_device, "length": shape.row_length}
        rows = []
        for shelf in packers:
            spread = pack_all_evenly(shelf.items, **limits)
            if spread is None:
                break
            rows.append(spread)
        if len(rows) == len(packers):
            return Packing((ShapeGroup(shape, count, rows),))
    return None


def min_micro_batches(packers: Sequence[RowPacker], full: MicroBatchShape, num_devices: int) -> int:
    """Micro-batches without which not even the tokens of the fullest host have a place."""
    most = max(shelf.num_tokens for shelf in packers)
    return -(-most // (num_devices * full.tokens_per_device))
