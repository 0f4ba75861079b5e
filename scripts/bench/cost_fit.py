"""Constants of a cost model from measured times. Pure: it runs nothing, and knows no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import NamedTuple

import numpy as np
from scipy.optimize import nnls

from app.rollout.scheduling.cost_model import CostModel

NAMES = tuple(field.name for field in fields(CostModel))
CALL = "call_s"
"""What it costs to time a program by itself; fitted, and no part of the model."""


class Timed(NamedTuple):
    """One measurement: seconds = sum of counts x constants."""

    what: str
    counts: Mapping[str, float]
    """Constant of the model, or `CALL` -> how often it was paid."""
    seconds: float


def decoded(steps: int, *, rows: int, cache_length: int) -> dict[str, float]:
    """Counts of decode steps."""
    cached = steps * rows * cache_length
    return {"step_s": steps, "step_row_s": steps * rows, "step_cached_token_s": cached}


def fit(measured: Sequence[Timed]) -> CostModel:
    """Non-negative least squares of relative errors: min sum_i (counts_i . c / seconds_i - 1)^2, c >= 0.

    Constants that no measurement has paid are 0, and of those that were always paid in the same proportion (a row's
    move and its tokens, where all caches are as long) one may take the other's share.
    Source: Lawson, Hanson, "Solving Least Squares Problems", 1974.
    """
    names = [name for name in (*NAMES, CALL) if any(one.counts.get(name) for one in measured)]
    seconds = np.asarray([one.seconds for one in measured])
    matrix = np.asarray([[one.counts.get(name, 0.0) for name in names] for one in measured]) / seconds[:, None]
    # Columns of one size: counts of calls and of tokens are five orders of magnitude apart.
    scale = np.linalg.norm(matrix, axis=0)
    found = nnls(matrix / scale, np.ones(len(measured)))[0] / scale
    constants = dict(zip(names, found.tolist(), strict=True))
    return CostModel(**{name: constants.get(name, 0.0) for name in NAMES})


def errors(measured: Sequence[Timed], cost: CostModel) -> dict[str, float]:
    """Of what was measured, predicted / measured; measurements of `CALL` seem too cheap by it."""
    constants = cost.to_json()
    return {
        one.what: sum(constants.get(name, 0.0) * count for name, count in one.counts.items()) / one.seconds
        for one in measured
    }
