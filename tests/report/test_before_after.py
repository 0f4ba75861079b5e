"""Tests a run's summary, early stopping, series of metrics, and statistics against slow oracles."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from app.checkpoint.retention import BestCheckpoint
from app.report.before_after import best_evaluation, summary_text
from app.report.confidence_intervals import clustered_share_interval, mean_interval, sign_test, wilson_interval
from app.report.metrics_history import Series, early_stopping_reason, finite_metric, matching_metric_names


def step(number: int, reward: float, **evaluation: float) -> dict[str, float]:
    metrics = {f"eval/{name}": value for name, value in evaluation.items()}
    return {"step": number, "reward/mean": reward, "time/step_s": float(number), **metrics}


def test_run_summary_compares_start_and_end() -> None:
    before = {"step": 0, "eval/accuracy": 0.125, "eval/mean_length": 3.25}
    steps = [step(1, 0.0), step(2, 0.5), step(3, 1.0), step(4, 0.5, accuracy=0.9, mean_length=2.0)]
    rows = [line.split() for line in summary_text([before, *steps], path="runs/a").splitlines()]
    assert rows[1:3] == [["accuracy", "12.5", "%", "90.0", "%"], ["mean_length", "3.2", "2.0"]]
    assert " ".join(rows[3]).startswith("training reward 0.250 in the first 2 steps, 0.750 in the last; 4 steps, ")
    assert "4 steps, median 2.50 s a step, 10 s in all" in summary_text(steps, path="runs/a")
    last = step(2, 0.5) | {"data/total_tokens": 1234567, "data/epoch": 0.0625}
    assert "1,234,567 tokens, 0.0625 epochs of the data" in summary_text([step(1, 0.5), last], path="runs/a")
    unknown = summary_text([{**last, "data/epoch": None}], path="runs/a")
    assert "1 step, median 2.00 s" in unknown and "epochs" not in unknown


def test_run_summary_omits_the_best_checkpoint_without_later_evaluations() -> None:
    start, best = {"step": 0, "eval/accuracy": 0.5}, BestCheckpoint(0, "eval/accuracy", 0.5)
    assert "not improved" not in summary_text([start, step(1, 0.25)], path="runs/a", best=best)


def test_best_evaluation_is_the_earliest_best_after_the_start() -> None:
    for accuracies, sentence in (
        ([0.5, 0.25, 0.4], "Training has not improved eval/accuracy over the start (step 0): 50.0 %."),
        ([0.5, 0.25, 0.5], "Best eval/accuracy 50.0 % after step 2, no better than the start (step 0)."),
        ([0.5, 0.75, 0.75], "Best eval/accuracy 75.0 % after step 1."),
        ([0.5, None, None], ""),
    ):
        history = [{"step": step, "eval/accuracy": value} for step, value in enumerate(accuracies)]
        assert best_evaluation(history, "eval/accuracy") == sentence


METRIC = "eval/accuracy"


def lines(*values: float | None) -> list[dict[str, Any]]:
    """Returns the metrics of an evaluation before the first step, and of every second step."""
    evaluated = [{"step": 2 * i, METRIC: value} for i, value in enumerate(values)]
    return [line for one in evaluated for line in ({"step": one["step"] - 1}, one)][1:]


def reason(history: list[dict[str, Any]], **rules: Any) -> str | None:
    return early_stopping_reason(history, **{"metric": METRIC, "patience": None, **rules})


@pytest.mark.parametrize(
    ("values", "patience", "ends"),
    [
        *(((0.5, 0.4, 0.3), 2, True), ((0.5, 0.4, 0.6), 2, False), ((0.5, 0.4, 0.6, 0.6, 0.6), 2, True)),
        *(((0.5, 0.55), 1, False), ((0.5, None, None), 2, True), ((None, None), 1, True)),
        *(((math.nan, 0.1), 1, False), ((0.9, 0.1, 0.1), None, False)),
    ],
)
def test_a_run_stops_early_without_improvement(values, patience, ends):
    history = lines(*values)
    assert (reason(history, patience=patience) is not None) == ends
    # A run stops only after an evaluation.
    assert reason([*history, {"step": 99}], patience=patience) is None


def test_early_stopping_reason_names_value_and_setting() -> None:
    assert reason([], patience=1) is None
    shorter = [{"step": step, "eval/mean_length": value} for step, value in enumerate((7.0, 6.0, 6.5))]
    stops = [reason(shorter[:n], metric="eval/mean_length", patience=1) is not None for n in (2, 3)]
    assert stops == [False, True]
    found, without = (reason(lines(*values), patience=2) for values in ((0.5, 0.25, 0.4), (None, None)))
    assert found is not None and "run.early_stopping.patience); its best value is 0.5" in found
    assert without is not None and "it has had no value" in without


def test_metric_series_keep_only_finite_values_and_can_be_averaged() -> None:
    values = [0.5, None, float("nan"), "x", True, 10**400, 2]
    history = [{"step": i, "a": value} for i, value in enumerate(values)] + [{"step": 9}]
    series = Series.from_history(history, "a")
    assert series.steps.tolist() == [0, 6] and series.values.tolist() == [0.5, 2]
    assert finite_metric({"a": -1}, "a") == -1 and finite_metric({}, "a") is None
    bins = Series(np.arange(1.0, 6.0), np.array([1.0, 3.0, 5.0, 9.0, 4.0])).binned(2)
    assert (bins.steps.tolist(), bins.values.tolist()) == ([1.5, 3.5, 5.0], [2.0, 7.0, 4.0])
    trailing = Series(np.arange(4.0), np.array([4.0, 0.0, 2.0, 7.0])).trailing_mean(3)
    np.testing.assert_allclose(trailing, [4, 2, 2, 3])


def test_metric_name_patterns_match_one_level_in_order() -> None:
    judge = {"reward/judge/mean": 1, "reward/judge/length/mean": 300, "eval/accuracy/difficulty_1": 1}
    history = [{"reward/mean": 1, "reward/b/mean": 1}, judge, {"reward/std": 1}]
    assert matching_metric_names(history, "reward/", "/mean") == ["reward/b/mean", "reward/judge/mean"]
    assert matching_metric_names(history, "eval/accuracy/", "") == ["eval/accuracy/difficulty_1"]


@pytest.mark.parametrize(
    ("share", "count", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.0, 10, 0.0, 0.2775), (1.0, 10, 0.7225, 1.0), (0.5, 1000, 0.4691, 0.5309)],
)
def test_the_interval_of_a_proportion_equals_the_wilson_interval(
    share: float, count: int, low: float, high: float
) -> None:
    assert wilson_interval(share, count) == pytest.approx((low, high), abs=1e-4)
    for bound in wilson_interval(share, count):
        # By definition, the observed share lies 1.96 standard errors away from each bound.
        if 0 < bound < 1:
            assert abs(share - bound) == pytest.approx(1.959964 * np.sqrt(bound * (1 - bound) / count), abs=1e-7)


def test_equal_samples_of_a_prompt_count_as_one_trial() -> None:
    alike = np.repeat([1.0, 0.0], 20)
    assert clustered_share_interval(alike, num_samples=8) == pytest.approx(wilson_interval(0.5, 40))
    # If half of every prompt's samples are right, prompts do not differ, and each sample is one trial.
    assert clustered_share_interval(np.full(40, 0.5), num_samples=8) == pytest.approx(wilson_interval(0.5, 320))
    for num_samples in (1, 8):
        assert clustered_share_interval(np.ones(40), num_samples=num_samples) == pytest.approx(wilson_interval(1.0, 40))
    assert clustered_share_interval(alike[15:25], num_samples=1) == pytest.approx(wilson_interval(0.5, 10))


def test_the_confidence_interval_of_proportions_has_95_percent_coverage() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(1000):
        # Prompts differ in how hard they are; over all of them two in three samples are right.
        shares = rng.binomial(4, rng.beta(2, 1, size=60)) / 4
        low, high = clustered_share_interval(shares, num_samples=4) or (0.0, 0.0)
        hits += low <= 2 / 3 <= high
    assert 0.93 <= hits / 1000 <= 0.97


def test_one_prompt_and_equal_values_have_no_confidence_interval() -> None:
    assert clustered_share_interval(np.array([0.5]), num_samples=8) is None
    assert mean_interval(np.array([3.0])) is None and mean_interval(np.zeros(100)) is None


def test_the_interval_of_a_mean_equals_students_t_interval() -> None:
    # By hand: mean 2, deviation 1, error 1/sqrt(3), t = 4.302653.
    assert mean_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx(
        (2 - 4.302653 / math.sqrt(3), 2 + 4.302653 / math.sqrt(3))
    )


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (5, 5), (9, 2), (2, 9), (6, 0)])
def test_the_sign_test_equals_enumerating_coin_flips(better: int, worse: int) -> None:
    falls = [sum(coins) for coins in product((0, 1), repeat=better + worse)]
    uneven = abs(better - worse)
    expected = np.mean([abs(2 * heads - better - worse) >= uneven for heads in falls])
    assert sign_test(better, worse) == pytest.approx(expected)
