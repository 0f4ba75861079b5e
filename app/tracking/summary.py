"""The summary at the end of a run: a table of metrics before and after training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.checkpoint.retention import BestCheckpoint
from app.report.before_after import before_and_after, format_metric
from app.report.metrics_history import accuracy_is_plug_in_mean


def summary_text(
    history: Sequence[Mapping[str, Any]], *, path: str, best: BestCheckpoint | None = None, early_end: str = ""
) -> str:
    """Returns the evaluation and reward at start and end, the time and speed, and the best checkpoint, as text.

    Args:
        early_end: why the run ended before its last step; empty if it did not.
    """
    result = before_and_after(history)
    table = [row for row in (result.header, *result.rows) if row is not None]
    lines = [f"{name:<28}{before:>12}{after:>12}" for name, before, after in table]
    lines += filter(None, [result.pace, early_end and f"ended early: {early_end}"])
    if best is not None:
        value = format_metric(best.metric, best.value, by_plug_in=accuracy_is_plug_in_mean(history))
        if best.step:
            lines.append(f"best {best.metric} {value} after step {best.step}: checkpoints/best")
        elif result.header:
            start = f"training has not improved {best.metric} on the start (step 0): {value}"
            lines.append(f"{start}, by the weights of model.path; there is no checkpoints/best")
    return "\n".join([*lines, f"everything is in {path}"])
