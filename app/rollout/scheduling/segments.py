"""How long a segment is, and when it ends early."""

from __future__ import annotations

import math


def budget_length(active: int, *, capacity: int, minimum: int, maximum: int) -> int:
    """clamp(capacity / active, minimum, maximum): few rows run long without interruption.

    Source: the P-DSR design, "Budget-Aware Segment Rollout".
    """
    return min(max(capacity // active, minimum), maximum)


def balanced_length(mean_length: float, *, overhead_steps: float, minimum: int, maximum: int) -> int:
    """The length at which a segment's fixed cost equals what finished rows idle: sqrt(2 o / h), clamped.

    With o the cost of a segment's edge in decode steps and h = 1 / mean length the chance of a row to finish at a step,
    a segment of L steps loses o / L to its edge, and h L / 2 to rows that wait for it.
    """
    return min(max(round(math.sqrt(2 * overhead_steps * mean_length)), minimum), maximum)


def finished_worth_leaving(active: int, mean_length: float, *, overhead_steps: float) -> int:
    """Finished rows that pay for a segment's edge when work waits for their slots: those of a balanced segment."""
    return max(1, round(active * math.sqrt(2 * overhead_steps / mean_length)))


def next_lower_rung(active: int, rungs: tuple[int, ...]) -> int:
    """Rows from which on a smaller program fits than the one that `active` rows need; 0 where there is none."""
    return max((rung for rung in rungs if rung < active), default=0)
