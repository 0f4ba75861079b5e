"""Chooses the number and shapes of micro-batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from app.batching.bin_packing import PackingRow, RowPacker, pack_all

TAIL_GROWTH = 1.05
"""Ratio between the allowed sizes of a last micro-batch: a larger ratio means more padding, a smaller one more shapes
to compile."""
MIN_TAIL_FRACTION, TAIL_STEP_FRACTION = 1 / 16, 1 / 64
"""Smallest size of a last micro-batch, and smallest difference between two sizes, as fractions of a full one."""
BLOCK_TOKENS = 128
"""Block size of the attention kernels; the length of rows of more than one block is a multiple of it."""


def bucket_length(length: int, *, min_bucket: int = 16) -> int:
    """Returns the smallest of 1, 1.5, 2, 3, 4, 6, 8, ... times `min_bucket` that is at least `length`."""
    size = min_bucket
    while size < length:
        size *= 2
    between = size * 3 // 4
    return between if min_bucket < between and length <= between else size


class MicroBatchShape(NamedTuple):
    """Shape of the part of a micro-batch on each device."""

    rows_per_device: int
    row_length: int
    """Tokens per row."""

    @property
    def tokens_per_device(self) -> int:
        return self.rows_per_device * self.row_length


class ShapeGroup(NamedTuple):
    """Number of micro-batches of one shape, and their rows, which are not yet assigned to micro-batches."""

    shape: MicroBatchShape
    num_micro_batches: int
    rows: Sequence[PackingRow]


Packing = tuple[ShapeGroup, ...]
"""Consecutive groups of micro-batches that contain all items."""


def packing_cost(packing: Packing) -> tuple[int, int]:
    """Returns the cost by which packings are compared: tokens computed per device, then tokens of all items."""
    return (
        sum(group.num_micro_batches * group.shape.tokens_per_device for group in packing),
        sum(item.num_tokens for group in packing for row in group.rows for item in row),
    )


def candidate_shapes(max_tokens_per_device: int, row_length: int) -> list[MicroBatchShape]:
    """Returns the possible shapes, smallest first. The last is full: all rows that the token budget allows."""
    full = MicroBatchShape(max_tokens_per_device // row_length, row_length)
    largest = full.tokens_per_device
    smallest = math.ceil(largest * MIN_TAIL_FRACTION)
    step = max(math.ceil(largest * TAIL_STEP_FRACTION), min(smallest, BLOCK_TOKENS))

    def shape(num_tokens: float) -> MicroBatchShape:
        num_tokens = min(max(math.ceil(num_tokens / step) * step, smallest), largest)
        num_rows = -(-num_tokens // row_length)
        length = -(-num_tokens // num_rows)
        if length > BLOCK_TOKENS:
            length = -(-length // BLOCK_TOKENS) * BLOCK_TOKENS
        return MicroBatchShape(num_rows, min(length, row_length))

    count = math.ceil(math.log(1 / MIN_TAIL_FRACTION, TAIL_GROWTH))
    shapes = {full, *(shape(largest / TAIL_GROWTH**power) for power in range(1, count + 1))}
    return sorted(shapes, key=lambda shape: (shape.tokens_per_device, shape == full))


def pack_into_fewest(
    packer: RowPacker, shapes: Sequence[MicroBatchShape], num_devices: int, *, even_tail: bool
) -> Packing:
    """Packs all items into few micro-batches: full ones, and a last one with the smallest shape that fits the rest.

    Args:
        num_devices: number of devices of all hosts.
        even_tail: whether the rows of the last micro-batch should have similar lengths.
    """
    full, packer = shapes[-1], packer.copy()
    rows: list[PackingRow] = []
    num_full = 0
    at_least = -(-packer.num_tokens // (num_devices * full.tokens_per_device))
    to_fill = max(at_least - 1, 0)
    while True:
        slots = to_fill * num_devices * full.rows_per_device
        while packer.items and slots:
            rows.append(packer.pack_row(full.row_length))
            slots -= 1
        num_full += to_fill
        for shape in shapes:
            tail = _pack_tail(packer, shape, num_devices, even_lengths=even_tail)
            if tail is not None:
                groups = (ShapeGroup(full, num_full, rows), ShapeGroup(shape, 1, tail))
                return groups if num_full else groups[1:]
        to_fill = 1


def _pack_tail(
    packer: RowPacker, shape: MicroBatchShape, num_devices: int, *, even_lengths: bool
) -> list[PackingRow] | None:
    num_rows, length = num_devices * shape.rows_per_device, shape.row_length
    if (rows := pack_all(packer, num_rows=num_rows, length=length)) and even_lengths:
        # All rows but the last are as full as possible; shorter rows distribute the free space evenly.
        shortest = -(-packer.num_tokens // num_rows)
        while shortest < length:
            middle = (shortest + length) // 2
            shorter = pack_all(packer, num_rows=num_rows, length=middle)
            rows, shortest, length = (rows, middle + 1, length) if shorter is None else (shorter, shortest, middle)
    return rows
