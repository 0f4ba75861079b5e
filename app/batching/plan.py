"""Which sample goes into which row of which micro-batch. Pure Python, no JAX."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """Rows of sample indices, `rows_per_micro_batch` at a time. Empty rows are padding."""

    rows: tuple[tuple[int, ...], ...]
    rows_per_micro_batch: int

    @property
    def num_micro_batches(self) -> int:
        return len(self.rows) // self.rows_per_micro_batch


def fixed_micro_batches(num_samples: int, *, rows_per_micro_batch: int, num_micro_batches: int | None = None) -> Plan:
    """One sample a row, in order, the last micro-batch filled up with empty rows.

    Args:
        rows_per_micro_batch: rows that this host feeds to one micro-batch.
        num_micro_batches: at least this many, so that hosts with fewer samples keep step.
    """
    needed = -(-num_samples // rows_per_micro_batch)
    count = max(needed, num_micro_batches or 1)
    rows = [(i,) for i in range(num_samples)]
    rows += [()] * (count * rows_per_micro_batch - num_samples)
    return Plan(tuple(rows), rows_per_micro_batch)
