"""The summary at the end of a run: a table of metrics before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.checkpoint.retention import BestCheckpoint
from app.report.before_after import before_and_after, best_sentence


def summary_text(history: Sequence[Mapping[str, Any]], *, path: str, best: BestCheckpoint | None = None) -> str:
    """Returns the evaluation and reward at start and end, the time and speed, and the best checkpoint, as text."""
    result = before_and_after(history)
    table = [row for row in (result.header, *result.rows) if row is not None]
    lines = [f"{name:<28}{before:>12}{after:>12}" for name, before, after in table]
    lines += filter(None, [result.pace])
    # The start is not the best of several evaluations if it is the only one.
    if best is not None and (best.step or result.header):
        place = ": checkpoints/best" if best.step else ", by the weights of model.path; there is no checkpoints/best"
        lines.append(best_sentence(history, best.metric, best.value, step=best.step) + place)
    return "\n".join([*lines, f"everything is in {path}"])
