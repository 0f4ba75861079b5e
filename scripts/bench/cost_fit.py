"""Constants of a cost model from measured times. Pure: it runs nothing, and knows no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import nnls

from scripts.bench.cost_model import CostModel

STEP_NAMES = ("step_s", "step_row_s", "step_cached_token_s")
OTHER_NAMES = tuple(field.name for field in fields(CostModel) if field.name not in (*STEP_NAMES, "measured_steps"))
FREE = replace(CostModel(), **dict.fromkeys((*STEP_NAMES, *OTHER_NAMES), 0.0))

Counts = Mapping[Any, float]
"""How often each was paid: one of `OTHER_NAMES`, `CALL`, or (rows, cache length), a step of that decode program."""
CALL = "call_s"
"""What it costs to time a segment by itself; fitted, and no part of the model."""


class Timed(NamedTuple):
    """One measurement: seconds = sum of counts x constants."""

    what: str
    counts: Counts
    seconds: float


def fit(measured: Sequence[Timed]) -> CostModel:
    """The model under which these times are least wrong, relative to what was measured.

    First everything that was paid, with a constant for each decode program, then the three constants of a step from
    those of the programs. What was never paid is 0, and of constants that were always paid in the same proportion (a
    row's move and its tokens, where all caches are as long) one may take the other's share.
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
    """min sum_i (counts_i . c / seconds_i - 1)^2, c >= 0. Source: Lawson, Hanson, "Solving Least Squares Problems"."""
    names = list(names)
    matrix = np.asarray([[one.get(name, 0.0) for name in names] for one in counts]) / np.asarray(seconds)[:, None]
    # Columns of one size: counts of calls and of tokens are five orders of magnitude apart.
    scale = np.linalg.norm(matrix, axis=0)
    return dict(zip(names, (nnls(matrix / scale, np.ones(len(seconds)))[0] / scale).tolist(), strict=True))


def explained(one: Timed, cost: CostModel) -> float:
    """Fitted / measured. A segment timed by itself seems too cheap, by `CALL`."""
    constants = {name: getattr(cost, name) for name in OTHER_NAMES}
    constants |= {(rows, length): seconds for rows, length, seconds in cost.measured_steps}
    return sum(constants.get(name, 0.0) * count for name, count in one.counts.items()) / one.seconds
