"""The length of segments, and the conditions under which they end early."""

from __future__ import annotations

import math
from typing import NamedTuple

from settings.schema.rollout import SegmentSettings

OVERHEAD_STEPS = 0.5
"""Assumed fixed cost of a segment, in decode steps."""
PRIOR_LENGTH_SHARE = 0.25
"""Assumed mean length before any sample has finished, as a fraction of the allowed tokens."""


class SegmentLimits(NamedTuple):
    """Conditions that end a segment before all rows are done."""

    length: int
    """Maximum number of tokens per row."""
    leave_when_finished: int = 0
    """Number of finished rows at which the segment ends because samples wait for slots; 0 = no limit."""
    leave_when_active: int = 0
    """Number of active rows at which the segment ends because a smaller program fits; 0 = no limit."""


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

    Without waiting samples, the length is clamp(capacity / num_active, min, max) tokens, and the segment ends early
    when the next smaller program fits. Otherwise let o be the fixed cost of a segment in decode steps, and h = 1 / mean
    length the chance that a row finishes at a step. A segment of L steps loses o / L per step to its fixed cost, and
    h L / 2 to finished rows that wait for its end. The sum is smallest at L = sqrt(2 o / h), which becomes the length
    (clamped); the segment ends early when num_active h L rows have finished.

    Source: the P-DSR design, "Budget-Aware Segment Rollout", for the first rule.

    Args:
        bounds: minimum and maximum length of a segment.
        num_active: number of rows on the worker.
        has_waiting: whether samples could take the slots of rows that finish.
        mean_length: mean length of completions.
        batch_sizes: batch sizes of the worker's smaller decode programs.
        capacity: number of tokens that its KV cache holds.
    """
    if not has_waiting:
        length = min(max(capacity // num_active, bounds.min), bounds.max)
        return SegmentLimits(length, 0, max((size for size in batch_sizes if size < num_active), default=0))
    length = min(max(round(math.sqrt(2 * OVERHEAD_STEPS * mean_length)), bounds.min), bounds.max)
    return SegmentLimits(length, max(1, round(num_active * math.sqrt(2 * OVERHEAD_STEPS / mean_length))), 0)


def prior_mean_length(max_new: int) -> float:
    """Returns the assumed mean length before any sample has finished, at least 1."""
    return max(1.0, PRIOR_LENGTH_SHARE * max_new)
