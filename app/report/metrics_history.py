"""The lines of `metrics.jsonl` as series of numbers. A line may lack a metric or hold null for it."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np

MetricsRecord = Mapping[str, Any]
"""One line: `step` and metrics by name."""
History = Sequence[MetricsRecord]


def finite_metric(record: MetricsRecord, name: str) -> float | None:
    """The metric as a finite number; None where it is absent, null or something else."""
    value = record.get(name)
    return float(value) if is_number(value) else None


def is_number(value: Any) -> TypeGuard[int | float]:
    """Whether a JSON value is a number that a float can hold."""
    # JSON's true is an int to Python. NaN compares as False.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def training_steps(history: History) -> list[MetricsRecord]:
    """The lines that a training step wrote: not the evaluation before the first one."""
    return [record for record in history if "reward/mean" in record]


def accuracy_is_plug_in_mean(history: History) -> bool:
    """Whether `eval/accuracy` is the mean of a plug-in's own values, not a share of right answers.

    Evaluations say so by a null `eval/format_rate`: only a task knows what an answer should look like.
    """
    return any(record.get("eval/format_rate", 0.0) is None for record in history)


def matching_metric_names(history: History, prefix: str, suffix: str) -> list[str]:
    """Every metric `<prefix><one name><suffix>`, in the order in which they came: none with another `/` in between."""
    names = dict.fromkeys(name for record in history for name in record)
    fits = re.compile(f"{re.escape(prefix)}[^/]+{re.escape(suffix)}", re.DOTALL)
    return [name for name in names if fits.fullmatch(name)]


@dataclass(frozen=True)
class Series:
    """The finite values of one metric."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def from_history(cls, history: History, name: str) -> Series:
        points = [(r["step"], value) for r in history if (value := finite_metric(r, name)) is not None]
        steps, values = zip(*points, strict=True) if points else ((), ())
        return cls(np.asarray(steps, float), np.asarray(values, float))

    def __len__(self) -> int:
        return len(self.steps)

    def binned(self, size: int) -> Bins:
        """Neighbours joined, `size` at a time, the last bin with what is left."""
        starts = np.arange(0, len(self), size)
        if size == 1 or not len(self):
            return Bins(self.steps, self.values, self.values, self.values)
        counts = np.diff(np.append(starts, len(self)))
        return Bins(
            np.add.reduceat(self.steps, starts) / counts,
            np.add.reduceat(self.values, starts) / counts,
            np.minimum.reduceat(self.values, starts),
            np.maximum.reduceat(self.values, starts),
        )

    def trailing_mean(self, width: int) -> np.ndarray:
        """Mean of each value and those up to `width - 1` steps before it."""
        totals = np.cumsum(np.concatenate([[0.0], self.values]))
        ends = np.arange(1, len(self) + 1)
        starts = np.maximum(ends - width, 0)
        return (totals[ends] - totals[starts]) / (ends - starts)


@dataclass(frozen=True)
class Bins:
    """Means of neighbouring points, and their extremes."""

    steps: np.ndarray
    means: np.ndarray
    lows: np.ndarray
    highs: np.ndarray
