from __future__ import annotations

import math
from typing import Any

import pytest

from app.report.metrics_history import early_stopping_reason

METRIC = "eval/accuracy"


def lines(*values: float | None) -> list[dict[str, Any]]:
    """Returns the metrics of an evaluation before the first step, and of every second step."""
    evaluated = [{"step": 2 * i, METRIC: value} for i, value in enumerate(values)]
    return [line for one in evaluated for line in ({"step": one["step"] - 1}, one)][1:]


def reason(history: list[dict[str, Any]], **rules: Any) -> str | None:
    return early_stopping_reason(history, **{"metric": METRIC, "patience": None, **rules})


@pytest.mark.parametrize(
    ("values", "rules", "ends"),
    [
        ((0.5, 0.4, 0.3), {"patience": 2}, True),
        ((0.5, 0.4, 0.6), {"patience": 2}, False),
        ((0.5, 0.4, 0.6, 0.6, 0.6), {"patience": 2}, True),
        ((0.5, 0.55), {"patience": 1}, False),
        ((0.5, None, None), {"patience": 2}, True),
        ((None, None), {"patience": 1}, True),
        ((math.nan, 0.1), {"patience": 1}, False),
        ((0.9, 0.1, 0.1), {}, False),
    ],
)
def test_a_run_ends_without_improvement(values: tuple[float | None, ...], rules: dict[str, Any], ends: bool) -> None:
    assert (reason(lines(*values), **rules) is not None) == ends


def test_a_run_ends_only_after_an_evaluation() -> None:
    history = lines(0.5, 0.4)
    assert reason(history, patience=1) is not None
    assert reason([*history, {"step": 3}], patience=1) is None
    assert reason([], patience=1) is None


def test_the_reason_names_the_values_and_the_setting() -> None:
    assert reason(lines(0.5, 0.25, 0.4), patience=2) == (
        "eval/accuracy has not improved in 2 evaluations (run.early_stopping.patience); its best value is 0.5"
    )
    assert reason(lines(None, None), patience=2) == (
        "eval/accuracy has not improved in 2 evaluations (run.early_stopping.patience); it has had no value"
    )


def test_shorter_answers_are_better() -> None:
    history = [{"step": step, "eval/mean_length": value} for step, value in enumerate((7.0, 6.0, 6.5))]
    assert reason(history, metric="eval/mean_length", patience=1) is not None
    assert reason(history[:2], metric="eval/mean_length", patience=1) is None
