"""The last word of a run: before -> after, in a table for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.training.preservation import Best

EDGE = 10
"""Training steps averaged at each end of a run: one step's reward is mostly noise."""


def summary_text(history: Sequence[Mapping[str, Any]], *, path: str, best: Best | None = None) -> str:
    """Evaluation and reward at the start and at the end, the best checkpoint, time and speed."""
    evaluations = [m for m in history if "eval/accuracy" in m]
    steps = [m for m in history if "reward/mean" in m]
    lines = []
    if len(evaluations) >= 2:
        before, after = evaluations[0], evaluations[-1]
        lines.append(f"{'held out':<28}{'step ' + str(before['step']):>12}{'step ' + str(after['step']):>12}")
        for name in [n for n in after if n.startswith("eval/")]:
            unit = _unit(name)
            lines.append(f"{name.removeprefix('eval/'):<28}{before[name]:>12{unit}}{after[name]:>12{unit}}")
    if steps:
        edge = max(min(EDGE, len(steps) // 2), 1)
        first, last = (np.mean([m["reward/mean"] for m in part]) for part in (steps[:edge], steps[-edge:]))
        lines.append(f"{f'reward, mean of {edge} steps':<28}{first:>12.3f}{last:>12.3f}")
        seconds = sorted(m["time/step_s"] for m in steps)
        lines.append(
            f"{len(steps)} steps, median {seconds[len(seconds) // 2]:.2f} s a step, {sum(seconds):.0f} s in all"
        )
    if best is not None:
        lines.append(f"best {best.metric} {best.value:{_unit(best.metric)}} after step {best.step}: checkpoints/best")
    return "\n".join([*lines, f"everything is in {path}"])


def _unit(metric: str) -> str:
    """How the values of an evaluation's metric are written."""
    return ".1f" if metric == "eval/mean_length" else ".1%"
