"""Fits the constants of a cost model to measured times. It runs nothing and reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from scripts.simulate.cost_model import CostModel

NAMES = tuple(field.name for field in fields(CostModel) if field.name.endswith("_s"))
FREE = replace(CostModel(), **dict.fromkeys(NAMES, 0.0))

Counts = Mapping[str, float]
"""How often each constant was paid, one of `NAMES` or `CALL`."""
CALL = "call_s"
"""Cost of timing a single segment; fitted, but not a part of the model."""


class Timed(NamedTuple):
    """One measurement: seconds = sum of counts x constants."""

    what: str
    counts: Counts
    seconds: float


def fit(measured: Sequence[Timed]) -> CostModel:
    """Returns the model with the smallest relative errors of these times.

    A constant that was never paid is 0. If two were always paid in the same proportion (moving a row and its tokens, if
    all caches have one length), one may absorb the other.
    """
    names = sorted({name for one in measured for name, count in one.counts.items() if count})
    found = _least_squares([one.counts for one in measured], names, [one.seconds for one in measured])
    return replace(FREE, **{name: found.get(name, 0.0) for name in NAMES})


def _least_squares(counts: Sequence[Counts], names: Iterable[Any], seconds: Sequence[float]) -> dict[Any, float]:
    """Returns c >= 0 that minimizes sum_i (counts_i . c / seconds_i - 1)^2. Source: Lawson, Hanson 1974."""
    names = list(names)
    matrix = np.asarray([[one.get(name, 0.0) for name in names] for one in counts]) / np.asarray(seconds)[:, None]
    # Columns of one size: counts of calls and of tokens are five orders of magnitude apart.
    scale = np.linalg.norm(matrix, axis=0)
    return dict(zip(names, (nnls(matrix / scale, np.ones(len(seconds)))[0] / scale).tolist(), strict=True))


def explained(one: Timed, cost: CostModel) -> float:
    """Returns fitted / measured seconds. A single timed segment is underestimated by `CALL`."""
    return sum(getattr(cost, name, 0.0) * count for name, count in one.counts.items()) / one.seconds


def step_counts(num_steps: int, *, rows: int, cache_length: float) -> dict[str, float]:
    """Returns what these decode steps pay."""
    return {
        "step_s": num_steps,
        "step_row_s": num_steps * rows,
        "step_cached_token_s": num_steps * rows * cache_length,
    }
