"""Metrics at the start and at the end of a run, for its final console output and the top of its report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.records.text_format import format_count, format_percent
from app.report.metrics_history import (
    EVAL_PROMPTS,
    History,
    Series,
    accuracy_is_plug_in_mean,
    best_step,
    finite_metric,
    training_steps,
)

EDGE_STEPS = 10
"""Number of training steps averaged at each end of a run: the reward of one step is mostly noise."""


class BeforeAfter(NamedTuple):
    """Evaluation metrics and training reward at the start and the end of a run, as text."""

    table: Sequence[tuple[str, str, str]]
    """Column headings, and a row for each metric; empty with fewer than two evaluations."""
    pace: str
    """Training reward, number of steps and their times; empty before the first step."""


def before_and_after(history: History) -> BeforeAfter:
    """Returns evaluation metrics and the training reward at the start and at the end, and the time per step."""
    evaluations = [record for record in history if finite_metric(record, "eval/accuracy") is not None]
    steps = training_steps(history)
    table, pace = [], ""
    if len(evaluations) >= 2:
        before, after = evaluations[0], evaluations[-1]
        table.append(("held out", f"step {before['step']}", f"step {after['step']}"))
        by_plug_in = accuracy_is_plug_in_mean(evaluations)
        for name in (name for name in after if name.startswith("eval/") and name != EVAL_PROMPTS):
            values = [finite_metric(record, name) for record in (before, after)]
            # Show errors only if there were any.
            if values != [None, None] and not (name.endswith("_count") and not any(values)):
                start, end = (format_metric(name, value, by_plug_in=by_plug_in) for value in values)
                table.append((name.removeprefix("eval/"), start, end))
    if steps:
        edge = max(min(EDGE_STEPS, len(steps) // 2), 1)
        first, last = (Series.from_history(part, "reward/mean").values for part in (steps[:edge], steps[-edge:]))
        if len(first) and len(last):
            pace = f"training reward {np.mean(first):z.3f} in the first {format_count(edge, 'step')}, "
            pace += f"{np.mean(last):z.3f} in the last; "
        seconds = Series.from_history(steps, "time/step_s").values
        if len(seconds):
            pace += f"{format_count(len(steps), 'step')}, median {np.median(seconds):.2f} s a step, "
            pace += f"{sum(seconds):.0f} s in all"
        if (tokens := finite_metric(steps[-1], "data/total_tokens")) is not None:
            epoch = finite_metric(steps[-1], "data/epoch")
            pace += f"; {tokens:,.0f} tokens" + ("" if epoch is None else f", {epoch:.3g} epochs of the data")
    return BeforeAfter(table, pace)


def summary_text(
    history: History, *, path: str, best: tuple[int, str, float] | None = None, early_end: str = ""
) -> str:
    """Returns the result of `before_and_after` and the best checkpoint as text for the end of a run.

    Args:
        best: step, metric and value of the best evaluation; its checkpoint is `checkpoints/best` unless the step is 0.
        early_end: why the run ended before its last step; empty if it did not.
    """
    result = before_and_after(history)
    lines = [f"{name:<28}{before:>12}{after:>12}" for name, before, after in result.table]
    lines += filter(None, [result.pace, early_end and f"ended early: {early_end}"])
    if best is not None and (best[0] or result.table):
        lines.append(
            _best_text(history, *best) + (": checkpoints/best" if best[0] else "; there is no checkpoints/best")
        )
    return "\n".join([*lines, f"everything is in {path}"])


def no_step_left(last_step: int) -> str:
    """Returns the message for a run that is resumed although its last step is done."""
    return f"no step is left after step {last_step}; --set run.steps={2 * last_step} continues the training"


def best_evaluation(history: History, metric: str | None) -> str:
    """Returns a sentence on the best value of `checkpoint.best_metric`; empty with fewer than two evaluations."""
    best = find_best(history, metric)
    if best is None:
        return ""
    text = _best_text(history, *best)
    return f"{text[0].upper()}{text[1:]}."


def find_best(history: History, metric: str | None) -> tuple[int, str, float] | None:
    """Returns step, metric and value of the best evaluation; None with fewer than two evaluations."""
    evaluated = {r["step"]: value for r in history if (value := finite_metric(r, metric or "")) is not None}
    step = best_step(evaluated, metric)
    return None if step is None or len(evaluated) < 2 else (step, str(metric), evaluated[step])


def _best_text(history: History, step: int, metric: str, value: float) -> str:
    text = format_metric(metric, value, by_plug_in=accuracy_is_plug_in_mean(history))
    if not step:
        return f"training has not improved {metric} over the start (step 0): {text}"
    # In a tie, the checkpoint counts, because it can be used.
    is_equal = any(record["step"] == 0 and finite_metric(record, metric) == value for record in history)
    return f"best {metric} {text} after step {step}{', no better than the start (step 0)' if is_equal else ''}"


def format_metric(name: str, value: float | None, *, by_plug_in: bool) -> str:
    """Formats an evaluation metric: fractions as percentages, except the accuracy of a plug-in (`by_plug_in`)."""
    if value is None:
        return "–"
    if by_plug_in and name.startswith("eval/accuracy"):
        return f"{value:z.3f}"
    if name.endswith(("length", "_count")):
        return f"{value:.1f}" if name.endswith("length") else f"{value:.0f}"
    return format_percent(value)
