from __future__ import annotations

import numpy as np

from app.report.metrics_history import Series, accuracy_is_plug_in_mean, finite_metric, matching_metric_names


def test_a_series_leaves_out_what_is_no_number() -> None:
    values = [0.5, None, float("nan"), "x", True, 10**400, 2]
    history = [{"step": i, "a": value} for i, value in enumerate(values)] + [{"step": 9}]
    series = Series.from_history(history, "a")
    assert series.steps.tolist() == [0, 6] and series.values.tolist() == [0.5, 2]
    assert finite_metric({"a": -1}, "a") == -1 and finite_metric({}, "a") is None


def test_bins_are_means_and_the_last_may_be_smaller() -> None:
    bins = Series(np.arange(1.0, 6.0), np.array([1.0, 3.0, 5.0, 9.0, 4.0])).binned(2)
    assert bins.steps.tolist() == [1.5, 3.5, 5.0]
    assert bins.values.tolist() == [2.0, 7.0, 4.0]


def test_a_trailing_mean_looks_back_only() -> None:
    series = Series(np.arange(4.0), np.array([4.0, 0.0, 2.0, 7.0]))
    np.testing.assert_allclose(series.trailing_mean(3), [4, 2, 2, 3])


def test_names_are_found_in_order_and_need_something_in_between() -> None:
    history = [{"reward/mean": 1, "reward/b/mean": 1}, {"reward/a/mean": 1, "reward/std": 1}]
    assert matching_metric_names(history, "reward/", "/mean") == ["reward/b/mean", "reward/a/mean"]


def test_a_null_format_rate_says_that_a_plug_in_judges() -> None:
    assert accuracy_is_plug_in_mean([{"step": 0, "eval/accuracy": 3.2, "eval/format_rate": None}, {"step": 1}])
    assert not accuracy_is_plug_in_mean([{"step": 0, "eval/accuracy": 0.5, "eval/format_rate": 0.0}, {"step": 1}])
    assert not accuracy_is_plug_in_mean([])


def test_further_numbers_of_a_plug_in_are_no_reward_functions() -> None:
    record = {"reward/judge/mean": 1, "reward/judge/length/mean": 300, "eval/accuracy/difficulty_1": 1}
    assert matching_metric_names([record], "reward/", "/mean") == ["reward/judge/mean"]
    assert matching_metric_names([record], "eval/accuracy/", "") == ["eval/accuracy/difficulty_1"]
