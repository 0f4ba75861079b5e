"""Assignment of rows to micro-batches and devices with balanced cost."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

EMPTY_SLOT = -1
"""Placeholder for a missing row on a device with fewer than `rows_per_device` rows."""


def assign_rows_in_order(
    num_rows: int, *, num_micro_batches: int, num_devices: int, rows_per_device: int
) -> list[list[int]]:
    """Returns consecutive row indices for each micro-batch, device by device; numbers of rows differ by at most 1."""
    slots = num_devices * rows_per_device
    blocks = np.array_split(np.arange(num_rows), num_micro_batches)
    return [block.tolist() + [EMPTY_SLOT] * (slots - len(block)) for block in blocks]


def assign_rows_balanced(
    row_costs: Sequence[float],
    *,
    num_micro_batches: int,
    num_devices: int,
    rows_per_device: int,
    device_loads: Sequence[float],
) -> tuple[list[list[int]], list[float]]:
    """Assigns rows to micro-batches as large as those of `assign_rows_in_order`, but balances the costs of devices.

    Rows of similar cost share a micro-batch. Within it, devices get parts of similar cost; the device with the smallest
    load so far gets the most expensive part.

    Args:
        row_costs: cost of each row.
        device_loads: total cost already assigned to each device.

    Returns:
        The row indices of each micro-batch, most expensive micro-batch first, and the new loads.
    """
    device_loads = list(device_loads)
    order = sorted(range(len(row_costs)), key=lambda row: (-row_costs[row], row))
    shape = {"num_micro_batches": num_micro_batches, "num_devices": num_devices, "rows_per_device": rows_per_device}
    assigned = []
    for block in assign_rows_in_order(len(row_costs), **shape):
        rows = [order[i] if i != EMPTY_SLOT else EMPTY_SLOT for i in block]
        weights = [row_costs[row] if row != EMPTY_SLOT else 0 for row in rows]
        parts = balanced_partition(weights, num_devices)
        sums = [sum(weights[i] for i in part) for part in parts]
        rows_by_device: list[list[int]] = [[]] * num_devices
        heaviest_first = sorted(range(num_devices), key=lambda part: (-sums[part], part))
        for part, device in zip(
            heaviest_first, sorted(range(num_devices), key=lambda d: (device_loads[d], d)), strict=True
        ):
            device_loads[device] += sums[part]
            rows_by_device[device] = [rows[i] for i in parts[part]]
        assigned.append([row for device in rows_by_device for row in device])
    return assigned, device_loads


def balanced_partition(weights: Sequence[float], num_parts: int) -> list[list[int]]:
    """Splits the indices of `weights` into sorted lists of equal size, whose weights have similar sums.

    The largest remaining weight joins the part with the smallest sum that is not yet full.

    Args:
        weights: weight of each index; their number must be a multiple of `num_parts`.

    Source: Kellerer and Woeginger 1993, "A Tight Bound for 3-Partitioning".
    """
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    open_parts: list[tuple[float, int]] = [(0, part) for part in range(num_parts)]
    for i in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        total, part = heapq.heappop(open_parts)
        parts[part].append(i)
        if len(parts[part]) < len(weights) // num_parts:
            heapq.heappush(open_parts, (total + weights[i], part))
    return [sorted(part) for part in parts]
