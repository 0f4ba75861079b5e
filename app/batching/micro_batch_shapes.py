"""Chooses the number and shapes of micro-batches for the items of all hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from app.batching.bin_packing import PackingRow, RowPacker, pack_all, pack_all_evenly

TAIL_FRACTIONS = tuple(Fraction(n, 16) for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))
"""Sizes that a micro-batch may have, as fractions of the quota; few, since each is a shape to compile."""
BLOCK_TOKENS = 128
"""Block size of the attention kernels; the length of longer rows is a multiple of it."""


class MicroBatchShape(NamedTuple):
    """Shape of the part of a micro-batch on each device."""

    rows_per_device: int
    row_length: int
    """Tokens per row."""

    @property
    def tokens_per_device(self) -> int:
        return self.rows_per_device * self.row_length


class ShapeGroup(NamedTuple):
    """Micro-batches of one shape, and each host's rows, which are not yet assigned to these micro-batches."""

    shape: MicroBatchShape
    num_micro_batches: int
    rows_by_host: Sequence[Sequence[PackingRow]]


@dataclass(frozen=True, slots=True)
class Packing:
    """Groups of micro-batches, one after another, that contain all items."""

    shape_groups: tuple[ShapeGroup, ...]

    @property
    def num_micro_batches(self) -> int:
        return sum(group.num_micro_batches for group in self.shape_groups)

    @property
    def cost(self) -> tuple[int, int]:
        """Cost for comparison: tokens computed per device, then tokens of all items."""
        return (
            sum(group.num_micro_batches * group.shape.tokens_per_device for group in self.shape_groups),
            sum(
                item.num_tokens
                for group in self.shape_groups
                for rows in group.rows_by_host
                for row in rows
                for item in row
            ),
        )

    def to_full_shape(self, full: MicroBatchShape, count: int) -> Packing:
        """Returns the same rows in `count` micro-batches of the full shape."""
        hosts = zip(*(group.rows_by_host for group in self.shape_groups), strict=True)
        return Packing((ShapeGroup(full, count, [[row for rows in host for row in rows] for host in hosts]),))


def candidate_shapes(max_tokens_per_device: int, row_length: int) -> list[MicroBatchShape]:
    """Returns the possible shapes, smallest first: one short row, then more rows. The last is the full shape."""

    def shape(num_tokens: int) -> MicroBatchShape:
        if num_tokens >= row_length:
            return MicroBatchShape(num_tokens // row_length, row_length)
        return MicroBatchShape(1, round_down_to_blocks(num_tokens))

    shapes = {shape(max(1, int(max_tokens_per_device * share))) for share in TAIL_FRACTIONS}
    return sorted(shapes, key=lambda shape: shape.tokens_per_device)


def round_down_to_blocks(num_tokens: int) -> int:
    """Returns the length rounded down to whole blocks; lengths below one block are unchanged."""
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS or num_tokens


def pack_into_fewest(
    packers: Sequence[RowPacker], shapes: Sequence[MicroBatchShape], num_devices: int, *, even_tail: bool
) -> Packing:
    """Packs all items into few micro-batches: full ones, and a last one of the smallest shape that holds the rest.

    Args:
        num_devices: number of devices per host.
        even_tail: whether the rows of the last micro-batch should have similar lengths.
    """
    full = shapes[-1]
    packers = [packer.copy() for packer in packers]
    rows: list[list[PackingRow]] = [[] for _ in packers]
    num_full = 0
    to_fill = max(min_micro_batches(packers, full, num_devices) - 1, 0)
    while True:
        for packer, packed in zip(packers, rows, strict=True):
            slots = to_fill * num_devices * full.rows_per_device
            while packer.items and slots:
                packed.append(packer.pack_row(full.row_length))
                slots -= 1
        num_full += to_fill
        for shape in shapes:
            tails = _pack_tails(packers, shape, num_devices, even_lengths=even_tail)
            if tails is not None:
                groups = (ShapeGroup(full, num_full, rows), ShapeGroup(shape, 1, tails))
                return Packing(groups if num_full else groups[1:])
        to_fill = 1


def _pack_tails(
    packers: Sequence[RowPacker], shape: MicroBatchShape, num_devices: int, *, even_lengths: bool
) -> list[list[PackingRow]] | None:
    limits = {"num_rows": num_devices * shape.rows_per_device, "length": shape.row_length}
    tails = []
    for packer in packers:
        rows = pack_all_evenly(packer.items, **limits) if even_lengths else None
        rows = pack_all(packer, **limits) if rows is None else rows
        if rows is None:
            return None
        tails.append(rows)
    return tails


def pack_evenly(
    packers: Sequence[RowPacker], shapes: Sequence[MicroBatchShape], num_devices: int, *, count: int
) -> Packing | None:
    """Packs all items into `count` micro-batches of the smallest shape that holds rows of similar lengths, or None."""
    for shape in shapes:
        limits = {"num_rows": count * num_devices * shape.rows_per_device, "length": shape.row_length}
        rows = []
        for packer in packers:
            even_rows = pack_all_evenly(packer.items, **limits)
            if even_rows is None:
                break
            rows.append(even_rows)
        if len(rows) == len(packers):
            return Packing((ShapeGroup(shape, count, rows),))
    return None


def min_micro_batches(packers: Sequence[RowPacker], full: MicroBatchShape, num_devices: int) -> int:
    """Returns a lower bound on the number of micro-batches, from the tokens of the fullest host."""
    max_tokens = max(packer.num_tokens for packer in packers)
    return -(-max_tokens // (num_devices * full.tokens_per_device))
