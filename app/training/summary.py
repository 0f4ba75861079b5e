"""The last word of a run: before -> after, in a table for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

EDGE = 10
"""Training steps averaged at each end of a run: one step's reward is mostly noise."""
UNITS = {"eval/mean_length": ".1f", "eval/error_count": ".0f"}
"""How evaluation metrics that are no shares are written."""


def summary_text(history: Sequence[Mapping[str, Any]], *, path: str) -> str:
    """Evaluation and reward at the start and at the end, time and speed."""
    evaluations = [m for m in history if "eval/accuracy" in m]
    steps = [m for m in history if "reward/mean" in m]
    lines = []
    if len(evaluations) >= 2:
        before, after = evaluations[0], evaluations[-1]
        lines.append(f"{'held out':<28}{'step ' + str(before['step']):>12}{'step ' + str(after['step']):>12}")
        for name in _told(before, after):
            unit = UNITS.get(name, ".1%")
            lines.append(f"{name.removeprefix('eval/'):<28}{before[name]:>12{unit}}{after[name]:>12{unit}}")
    if steps:
        edge = max(min(EDGE, len(steps) // 2), 1)
        first, last = (np.mean([m["reward/mean"] for m in part]) for part in (steps[:edge], steps[-edge:]))
        lines.append(f"{f'reward, mean of {edge} steps':<28}{first:>12.3f}{last:>12.3f}")
        seconds = sorted(m["time/step_s"] for m in steps)
        lines.append(
            f"{len(steps)} steps, median {seconds[len(seconds) // 2]:.2f} s a step, {sum(seconds):.0f} s in all"
        )
    return "\n".join([*lines, f"everything is in {path}"])


def _told(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Evaluation metrics worth a line: known at both ends; failures only where there were any."""
    names = [name for name in after if name.startswith("eval/") and None not in (before.get(name), after[name])]
    return [name for name in names if name != "eval/error_count" or before[name] or after[name]]
