"""The length of segments, and the conditions under which they end early."""

from __future__ import annotations

import math
from typing import NamedTuple

from settings.schema.rollout import SegmentSettings

OVERHEAD_STEPS = 0.5
"""Assumed overhead of ending a segment, in decode steps."""
PRIOR_LENGTH_SHARE = 0.25
"""Assumed mean length before any sample has finished, as a share of the allowed tokens."""


class SegmentLimits(NamedTuple):
    """Conditions that end a segment before all rows are done. 0 disables a condition."""

    length: int
    """Maximum number of tokens per row."""
    leave_when_finished: int
    """Number of finished rows at which the segment ends, because samples wait for their slots."""
    leave_when_active: int
    """Number of active rows at which the segment ends, because a smaller program fits."""


def segment_limits(
    bounds: SegmentSettings,
    *,
    num_active: int,
    has_waiting: bool,
    mean_length: float,
    batch_sizes: tuple[int, ...],
    capacity: int,
) -> SegmentLimits:
    """Returns the limits of a worker's next segment.

    Args:
        num_active: number of rows on the worker.
        has_waiting: whether samples could take the slots of rows that finish.
        mean_length: mean length of completions.
        batch_sizes: numbers of rows of the worker's smaller programs.
        capacity: number of tokens that its KV cache holds.
    """
    if not has_waiting:
        length = budget_length(num_active, capacity=capacity, minimum=bounds.min, maximum=bounds.max)
        return SegmentLimits(length, 0, next_smaller_batch(num_active, batch_sizes))
    length = balanced_length(mean_length, overhead_steps=OVERHEAD_STEPS, minimum=bounds.min, maximum=bounds.max)
    return SegmentLimits(length, refill_threshold(num_active, mean_length, overhead_steps=OVERHEAD_STEPS), 0)


def prior_mean_length(max_new: int) -> float:
    """Returns the assumed mean length before any sample has finished, at least 1."""
    return max(1.0, PRIOR_LENGTH_SHARE * max_new)


def budget_length(num_active: int, *, capacity: int, minimum: int, maximum: int) -> int:
    """Returns clamp(capacity / num_active, minimum, maximum): few rows run long without interruption.

    Source: the P-DSR design, "Budget-Aware Segment Rollout".
    """
    return min(max(capacity // num_active, minimum), maximum)


def balanced_length(mean_length: float, *, overhead_steps: float, minimum: int, maximum: int) -> int:
    """Returns the length at which a segment's fixed cost equals the idle time of finished rows: sqrt(2 o / h), clamped.

    Let o be the fixed cost of a segment in decode steps, and h = 1 / mean length the chance that a row finishes at a
    step. A segment of L steps then loses o / L per step to its fixed cost, and h L / 2 to rows waiting for its end.
    """
    return min(max(round(math.sqrt(2 * overhead_steps * mean_length)), minimum), maximum)


def refill_threshold(num_active: int, mean_length: float, *, overhead_steps: float) -> int:
    """Returns how many finished rows, at least 1, justify a new segment when samples wait for their slots."""
    return max(1, round(num_active * math.sqrt(2 * overhead_steps / mean_length)))


def next_smaller_batch(num_active: int, batch_sizes: tuple[int, ...]) -> int:
    """Returns the largest batch size below `num_active`; 0 if there is none."""
    return max((rung for rung in batch_sizes if rung < num_active), default=0)
