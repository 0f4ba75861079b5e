"""Fits the constants of a cost model to measured times. It runs nothing and reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from scripts.simulate.cost_model import CostModel

STEP_NAMES = ("step_s", "step_row_s", "step_cached_token_s")
OTHER_NAMES = tuple(field.name for field in fields(CostModel) if field.name not in (*STEP_NAMES, "measured_steps"))
FREE = replace(CostModel(), **dict.fromkeys((*STEP_NAMES, *OTHER_NAMES), 0.0))

Counts = Mapping[Any, float]
"""How often each constant was paid: one of `OTHER_NAMES`, `CALL`, or (rows, cache length) for a step of that program.
"""
CALL = "call_s"
"""Cost of timing a single segment; fitted, but not a part of the model."""


class Timed(NamedTuple):
    """One measurement: seconds = sum of counts x constants."""

    what: str
    counts: Counts
    seconds: float


def fit(measured: Sequence[Timed]) -> CostModel:
    """Returns the model with the smallest relative errors of these times.

    It first fits all constants, with one for each decode program, and then the three constants of a step to those of
    the programs. A constant that was never paid is 0. If two were always paid in the same proportion (moving a row and
    its tokens, if all caches have one length), one may absorb the other.
    """
    names = sorted({name for one in measured for name, count in one.counts.items() if count}, key=str)
    found = _least_squares([one.counts for one in measured], names, [one.seconds for one in measured])
    programs = {paid: seconds for paid, seconds in found.items() if isinstance(paid, tuple) and seconds > 0}
    of_step = [{"step_s": 1.0, "step_row_s": rows, "step_cached_token_s": rows * length} for rows, length in programs]
    steps = _least_squares(of_step, STEP_NAMES, list(programs.values()))
    return CostModel(
        **{name: steps[name] for name in STEP_NAMES},
        **{name: found.get(name, 0.0) for name in OTHER_NAMES},
        measured_steps=tuple((*program, seconds) for program, seconds in programs.items()),
    )


def _least_squares(counts: Sequence[Counts], names: Iterable[Any], seconds: Sequence[float]) -> dict[Any, float]:
    """Returns c >= 0 that minimizes sum_i (counts_i . c / seconds_i - 1)^2. Source: Lawson, Hanson 1974."""
    names = list(names)
    matrix = np.asarray([[one.get(name, 0.0) for name in names] for one in counts]) / np.asarray(seconds)[:, None]
    # Columns of one size: counts of calls and of tokens are five orders of magnitude apart.
    scale = np.linalg.norm(matrix, axis=0)
    return dict(zip(names, (nnls(matrix / scale, np.ones(len(seconds)))[0] / scale).tolist(), strict=True))


def explained(one: Timed, cost: CostModel) -> float:
    """Returns fitted / measured seconds. A single timed segment is underestimated by `CALL`."""
    constants = {name: getattr(cost, name) for name in OTHER_NAMES}
    constants |= {(rows, length): seconds for rows, length, seconds in cost.measured_steps}
    return sum(constants.get(name, 0.0) * count for name, count in one.counts.items()) / one.seconds
