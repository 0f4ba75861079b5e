"""Tests that each alert is raised once if there is a problem, and none in a healthy run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.report.alerts import REARM_STEPS, Alert, AlertMonitor, find_alerts
from tests.report.run_directories import quickstart_history, step_record

History = list[dict[str, Any]]


def after_twenty_healthy_steps(num_steps: int, **metrics: float | None) -> History:
    return [step_record(step, **(metrics if step > 20 else {})) for step in range(1, 21 + num_steps)]


def titles(history: History) -> list[str]:
    return [alert.title for alert in find_alerts(history)]


def test_a_healthy_run_raises_none() -> None:
    history = quickstart_history()
    assert len(history) == 101 and history[-1]["eval/accuracy"] > 0.9
    assert find_alerts(history) == []


def test_a_history_without_steps_raises_none() -> None:
    assert find_alerts([]) == []
    assert find_alerts([{"step": 0, "eval/accuracy": 0.0}]) == []
    assert find_alerts([{"step": 1, "reward/mean": 0.5}]) == []


def test_samples_of_an_older_policy_are_no_mismatch() -> None:
    differences = {"rollout__sampler_scorer_logprob_diff_mean": 0.05}
    assert "Sampler and trainer disagree" in titles(after_twenty_healthy_steps(12, **differences))
    assert titles(after_twenty_healthy_steps(12, **differences, perf__rollout__staleness_max=1)) == []


def test_a_difference_that_importance_weights_correct_is_no_mismatch() -> None:
    def raised(difference: float) -> list[str]:
        metrics = {"rollout__sampler_scorer_logprob_diff_mean": difference, "policy__correction_mean": 1.0}
        return titles(after_twenty_healthy_steps(12, **metrics))

    assert raised(0.05) == []
    assert "Sampler and trainer disagree" in raised(0.2)


LONG = 12
"""Number of steps that exceeds the waiting time of every rule."""


@pytest.mark.parametrize(
    ("title", "metrics", "harmless"),
    [
        (
            "An update was skipped: NaN or infinity",
            {"policy__nonfinite_in_a_row": 1, "policy__nonfinite_updates": 1, "loss": None, "policy__grad_norm": None},
            {"policy__grad_norm": 50.0},
        ),
        ("Entropy has collapsed", {"policy__entropy": 0.015}, {"policy__entropy": 0.03}),
        (
            "All rewards are the same",
            {"reward__mean": 0.0, "reward__std": 0.0, "reward__zero_variance_fraction": 1.0},
            {"reward__mean": 0.001, "reward__std": 0.03, "reward__zero_variance_fraction": 0.9},
        ),
        (
            "Rewards are equal within almost every group",
            {"reward__zero_variance_fraction": 0.97},
            {"reward__zero_variance_fraction": 0.9},
        ),
        (
            "Many answers are truncated",
            {"completions__truncated_fraction": 0.3},
            {"completions__truncated_fraction": 0.2},
        ),
        ("The policy is far from the initial model", {"policy__kl": 0.8}, {"policy__kl": 0.2}),
        ("The policy moves too far within a step", {"policy__ratio_max": 20.0}, {"policy__ratio_max": 5.0}),
        (
            "The policy moves too far within a step",
            {"policy__clip_fraction_low": 0.2, "policy__clip_fraction_high": 0.2},
            {"policy__clip_fraction_low": 0.1, "policy__clip_fraction_high": 0.1},
        ),
        (
            "The policy moves too far within a step",
            {"policy__clip_fraction_low": 0.1, "policy__clip_fraction_high": 0.1, "policy__clip_fraction_dual": 0.15},
            {"policy__clip_fraction_dual": 0.2},
        ),
        (
            "Sampler and trainer disagree",
            {"rollout__sampler_scorer_logprob_diff_mean": 0.05},
            {"rollout__sampler_scorer_logprob_diff_mean": 0.004, "rollout__sampler_scorer_logprob_diff_max": 0.2},
        ),
        ("A reward function fails", {"reward__error_count": 3}, {"reward__error_count": 0}),
        ("Every step compiles", {"perf__compilations": 1}, {"perf__compilations": 0}),
    ],
)
def test_each_alert_is_raised_once_by_what_it_is_about_and_not_by_less(
    title: str, metrics: dict[str, float | None], harmless: dict[str, float | None]
) -> None:
    # Beyond the steps in which compilation is expected.
    assert titles(after_twenty_healthy_steps(20, **metrics)) == [title]
    assert titles(after_twenty_healthy_steps(20, **harmless)) == []


def test_an_alert_names_its_step_its_cause_and_a_setting_to_change() -> None:
    (alert,) = find_alerts(after_twenty_healthy_steps(LONG, completions__truncated_fraction=0.5))
    assert alert == Alert(23, alert.title, alert.text)  # the mean of five steps passes a quarter in the third
    assert "50.0 %" not in alert.text and "30.0 % of the completions" in alert.text
    assert "rollout.max_new_tokens" in alert.text


def test_one_bad_step_is_noise() -> None:
    for metrics in ({"completions__truncated_fraction": 0.9}, {"policy__ratio_max": 99.0}, {"policy__kl": 2.0}):
        assert titles(after_twenty_healthy_steps(1, **metrics)) == []


def test_an_alert_comes_again_only_after_its_cause_was_gone_for_a_while() -> None:
    def skipped(*steps: int) -> list[int]:
        history = [step_record(step, policy__nonfinite_in_a_row=int(step in steps)) for step in range(1, 100)]
        return [alert.step for alert in find_alerts(history)]

    assert skipped(10, 12, 14, 16) == [10]
    assert skipped(10, 10 + REARM_STEPS) == [10]
    assert skipped(10, 11 + REARM_STEPS) == [10, 11 + REARM_STEPS]


def test_an_update_skipped_within_a_step_is_noticed_though_the_next_one_was_fine() -> None:
    history = after_twenty_healthy_steps(1, policy__nonfinite_in_a_row=0, policy__nonfinite_updates=1)
    assert titles(history) == ["An update was skipped: NaN or infinity"]


def test_low_entropy_and_equal_rewards_of_a_solved_task_are_no_collapse() -> None:
    solved = {"reward__mean": 0.99, "reward__arithmetic__mean": 0.99, "policy__entropy": 0.001}
    assert titles(after_twenty_healthy_steps(LONG, **solved)) == []
    (alert,) = find_alerts(after_twenty_healthy_steps(LONG, **solved, reward__zero_variance_fraction=1.0))
    assert "Nearly every prompt is solved" in alert.text


@pytest.mark.parametrize(("mean", "cause"), [(0.0, "no answer is correct"), (1.5, "every prompt is solved")])
def test_a_constant_reward_is_explained_by_its_value(mean: float, cause: str) -> None:
    (alert,) = find_alerts(after_twenty_healthy_steps(LONG, reward__mean=mean, reward__std=1e-17))
    assert alert.title == "All rewards are the same" and cause in alert.text


def test_compilation_is_expected_in_the_first_steps() -> None:
    assert titles([step_record(step, perf__compilations=3) for step in range(1, 25)]) == []


def test_watching_step_by_step_says_what_the_whole_history_says() -> None:
    history = after_twenty_healthy_steps(30, policy__kl=1.0, completions__truncated_fraction=0.5)
    watch = AlertMonitor()
    assert [alert for record in history for alert in watch.observe(record)] == find_alerts(history)
    resumed = AlertMonitor(history[:25])
    assert [alert for record in history[25:] for alert in resumed.observe(record)] == [
        alert for alert in find_alerts(history) if alert.step > 25
    ]


@pytest.mark.parametrize("value", [None, "many", [], 10**400, True])
def test_a_metric_that_is_no_number_raises_nothing(value: Any) -> None:
    history = [{**record, **dict.fromkeys(record.keys() - {"step"}, value)} for record in quickstart_history()]
    assert find_alerts(history) == []


def evaluated(accuracies: dict[int, float], reward: Callable[[int], float], num_prompts: Any = 100) -> History:
    """Returns 40 healthy steps with these rewards, and held-out accuracies at some of them or before the first."""
    found = {step: {"eval/accuracy": one, "eval/num_prompts": num_prompts} for step, one in accuracies.items()}
    steps = [
        {k: v for k, v in step_record(step, reward__mean=reward(step)).items() if not k.startswith("eval/")}
        | found.get(step, {})
        for step in range(1, 41)
    ]
    return [{"step": 0, **found[0]}, *steps] if 0 in found else steps


def rising(step: int) -> float:
    return 0.3 + 0.01 * step


FALLS = "Held-out accuracy falls while the reward rises"


def test_an_accuracy_that_falls_while_the_reward_rises_is_over_optimization_even_from_the_start() -> None:
    history = evaluated({0: 0.6, 20: 0.4, 40: 0.35}, rising)
    (alert,) = find_alerts(history)
    assert (alert.step, alert.title) == (40, FALLS)
    figures = "fell from 60.0 % (step 0) to 35.0 % (step 40), while the mean reward rose from 0.355 to 0.655"
    assert figures in alert.text and "algorithm.beta" in alert.text
    watch = AlertMonitor()
    assert [one for record in history for one in watch.observe(record)] == [alert]


@pytest.mark.parametrize(
    ("accuracies", "reward"),
    [
        ({0: 0.6, 20: 0.65, 40: 0.35}, rising),  # a single low evaluation may be chance
        ({0: 0.6, 20: 0.55, 40: 0.5}, rising),  # within the noise of a hundred prompts
        ({0: 0.6, 20: 0.4, 40: 0.35}, lambda step: 0.7 - 0.005 * step),  # the reward falls, too
        ({0: 0.6, 20: 0.4, 40: 0.35}, lambda step: 0.5 + 0.1 * (step % 2)),  # nor does it rise beyond its noise
        ({0: 60.0, 20: 40.0, 40: 35.0}, rising),  # values of a plug-in, whose noise is unknown
    ],
)
def test_a_fall_by_chance_or_together_with_the_reward_is_no_over_optimization(
    accuracies: dict[int, float], reward: Callable[[int], float]
) -> None:
    assert FALLS not in titles(evaluated(accuracies, reward))


@pytest.mark.parametrize(
    ("num_prompts", "found"), [(100, []), (1000, [FALLS]), (None, []), (0, []), (-1000, []), ("many", [])]
)
def test_the_noise_of_an_accuracy_is_that_of_its_number_of_prompts(num_prompts: Any, found: list[str]) -> None:
    assert titles(evaluated({0: 0.6, 20: 0.55, 40: 0.5}, rising, num_prompts)) == found


COLLAPSED = {"reward__mean": 0.1, "policy__learning_rate": 3e-3}


@pytest.mark.parametrize(
    ("sign", "figures"),
    [
        ({"policy__entropy": 2.0}, "the entropy rose from"),
        ({"policy__entropy": 1e-3}, "the entropy fell from"),
        ({"policy__kl": 4.0}, "the KL to the initial model rose to 4"),
        ({"policy__grad_norm": 500.0}, "the gradient norm rose from"),
    ],
)
def test_a_collapse_of_the_reward_names_its_signs_and_the_learning_rate(
    sign: dict[str, float | None], figures: str
) -> None:
    found = {alert.title: alert for alert in find_alerts(after_twenty_healthy_steps(LONG, **COLLAPSED, **sign))}
    text = found["The reward has collapsed"].text
    assert "The mean reward of 5 steps fell from 0.8" in text and figures in text
    assert "optimizer.learning_rate, which reached 0.003: lower it to between 0.0003 and 0.001" in text
    # The same fall without a sign that the updates were too large, and the sign without a fall.
    assert titles(after_twenty_healthy_steps(LONG, **COLLAPSED)) == []
    assert "The reward has collapsed" not in titles(after_twenty_healthy_steps(LONG, **sign))


def test_a_collapse_in_the_first_update_is_noticed() -> None:
    first = step_record(1, reward__mean=0.4, reward__std=0.49, policy__entropy=0.2)
    rest = [step_record(step, reward__mean=0.0, reward__std=0.0, policy__entropy=0.001) for step in range(2, 9)]
    (alert,) = [one for one in find_alerts([first, *rest]) if one.title == "The reward has collapsed"]
    assert alert.step == 6 and "fell from 0.4 (up to step 1) to 0, and the entropy fell from 0.2 to 0.001" in alert.text


def test_a_single_lucky_step_is_no_best_reward_to_collapse_from() -> None:
    def history(num_lucky: int) -> History:
        rewards = [0.2] * 110 + [0.9] * num_lucky + [0.2] * 30
        return [step_record(i, reward__mean=r, policy__kl=4.0) for i, r in enumerate(rewards, start=1)]

    title = "The reward has collapsed"
    assert title not in titles(history(1)) and title in titles(history(5))


def test_rewards_below_zero_collapse_too_and_rare_successes_do_not() -> None:
    def collapses(best: float, later: float, std: float) -> bool:
        history = [step_record(1, reward__mean=best, reward__std=std, policy__entropy=0.2)]
        history += [step_record(step, reward__mean=later, reward__std=std, policy__entropy=2.0) for step in range(2, 9)]
        return "The reward has collapsed" in titles(history)

    assert collapses(-1.0, -3.0, 0.5) and not collapses(-1.0, -1.4, 0.5)
    assert not collapses(0.03, 0.01, 0.17)
