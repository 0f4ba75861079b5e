"""Reads series of numbers from the lines of `metrics.jsonl`, in which a metric may be missing or null."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

MetricsRecord = Mapping[str, Any]
"""One line of `metrics.jsonl`: maps `step` and the names of metrics to their values."""
History = Sequence[MetricsRecord]
EVAL_PROMPTS = "eval/num_prompts"
"""The number of prompts of an evaluation, which determines the noise of its other metrics."""
LOWER_IS_BETTER = frozenset({"eval/mean_length", "eval/truncated_fraction", "eval/error_count"})
"""Evaluation metrics for which lower is better."""


def finite_metric(record: MetricsRecord, name: str) -> float | None:
    """Returns a metric as a finite number; None if it is missing, null or not a finite number."""
    value = record.get(name)
    return float(value) if is_number(value) else None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Returns whether a JSON value is a number that a float can represent."""
    # Python treats JSON's true as an int. Comparisons with NaN are False.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def best_step(values: Mapping[int, float], metric: str | None) -> int | None:
    """Returns the step with the best value of a metric; None without values.

    In a tie, the earliest step is best, except that step 0, the start, must be better than all others.
    """
    sign = 1 if metric in LOWER_IS_BETTER else -1
    return min(values, key=lambda step: (sign * values[step], step == 0, step), default=None)


def early_stopping_reason(history: History, *, metric: str | None, patience: int | None) -> str | None:
    """Returns why a run ends after the last line of its metrics, or None if it continues.

    It ends if the last `patience` evaluations are not better than the best one before them, but never before the first
    step. An evaluation without a finite value counts as not better. Only the metrics matter, so a resumed run ends at
    the same step.

    Source: Keras, `EarlyStopping`; transformers, `EarlyStoppingCallback`.
    """
    if patience is None or metric is None or not history or not history[-1]["step"] or metric not in history[-1]:
        return None
    sign = -1 if metric in LOWER_IS_BETTER else 1
    values = [finite_metric(record, metric) for record in history if metric in record]
    best, num_stale = None, 0
    for value in values:
        is_better = value is not None and (best is None or sign * (value - best) > 0)
        best, num_stale = (value, 0) if is_better else (best, num_stale + 1)
    if num_stale >= patience:
        shown = "it has had no value" if best is None else f"its best value is {best:g}"
        return f"{metric} has not improved in {num_stale} evaluations (run.early_stopping.patience); {shown}"
    return None


def training_steps(history: History) -> list[MetricsRecord]:
    """Returns the lines of training steps, without the evaluation before the first step."""
    return [record for record in history if "reward/mean" in record or "loss" in record]


def accuracy_is_plug_in_mean(history: History) -> bool:
    """Returns whether `eval/accuracy` is the mean of a plug-in's values rather than the fraction of right answers.

    In such evaluations `eval/format_rate` is null, because only built-in tasks define a format.
    """
    return any(record.get("eval/format_rate", 0.0) is None for record in history)


def matching_metric_names(history: History, prefix: str, suffix: str) -> list[str]:
    """Returns all metrics `<prefix><name><suffix>` in the order of the history; `<name>` contains no `/`."""
    names = dict.fromkeys(name for record in history for name in record)
    fits = re.compile(f"{re.escape(prefix)}[^/]+{re.escape(suffix)}", re.DOTALL)
    return [name for name in names if fits.fullmatch(name)]


@dataclass(frozen=True)
class Series:
    """The finite values of one metric, and their steps."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def from_history(cls, history: History, name: str) -> Series:
        points = [(r["step"], value) for r in history if (value := finite_metric(r, name)) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return cls(np.asarray(steps, float), np.asarray(values, float))

    def __len__(self) -> int:
        return len(self.steps)

    def binned(self, size: int) -> Series:
        """Averages every `size` consecutive points into one; the last bin may have fewer."""
        starts = np.arange(0, len(self), size)
        if size == 1 or not len(self):
            return self
        counts = np.diff(np.append(starts, len(self)))
        return Series(*(np.add.reduceat(numbers, starts) / counts for numbers in (self.steps, self.values)))

    def trailing_mean(self, width: int) -> np.ndarray:
        """Returns the mean of each value and up to `width - 1` preceding values."""
        totals = np.cumsum(np.concatenate([[0.0], self.values]))
        ends = np.arange(1, len(self) + 1)
        starts = np.maximum(ends - width, 0)
        return (totals[ends] - totals[starts]) / (ends - starts)
