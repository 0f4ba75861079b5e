"""Tests that each alert is raised once if there is a problem, and none in a healthy run."""

from collections.abc import Callable
from typing import Any

import pytest

from app.report.alerts import REARM_STEPS, AlertMonitor, find_alerts
from tests.report.run_directories import quickstart_history, step_record

History = list[dict[str, Any]]


def after_twenty_healthy_steps(num_steps: int, **metrics: float | None) -> History:
    return [step_record(step, **(metrics if step > 20 else {})) for step in range(1, 21 + num_steps)]


def titles(history: History) -> list[str]:
    return [alert.title for alert in find_alerts(history)]


LONG = 12
"""Number of steps that exceeds the waiting time of every rule."""


def test_a_healthy_run_raises_no_alert() -> None:
    history = quickstart_history()
    assert len(history) == 101 and history[-1]["eval/accuracy"] > 0.9
    for healthy in (history, [], [{"step": 0, "eval/accuracy": 0.0}], [{"step": 1, "reward/mean": 0.5}]):
        assert find_alerts(healthy) == []
    # Compilation is expected in the first steps.
    assert titles([step_record(step, perf__compilations=3) for step in range(1, 25)]) == []


@pytest.mark.parametrize(
    "metrics",
    [
        {"reward__mean": 0.0, "reward__std": 0.0, "reward__zero_variance_fraction": 1.0},
        {"reward__zero_variance_fraction": 1.0},
        {"policy__entropy": 0.001},
    ],
)
def test_effects_of_a_teacher_raise_no_alert(metrics: dict[str, float]) -> None:
    assert len(titles(after_twenty_healthy_steps(LONG, **metrics))) == 1
    taught = {"policy__teacher_kl": 1.5, "policy__kl_coef": 1.0}
    assert titles(after_twenty_healthy_steps(LONG, **metrics, **taught)) == []


def test_low_entropy_on_given_completions_raises_no_alert() -> None:
    steps = after_twenty_healthy_steps(LONG, policy__entropy=0.001)
    assert titles([{name: x for name, x in step.items() if not name.startswith("reward/")} for step in steps]) == []


SKIPPED, MOVES = "An update was skipped: NaN or infinity", "The policy moves too far within a step"
EQUAL, SAME = "Rewards are equal within almost every group", "All rewards are the same"
LOW, HIGH, DUAL = (f"policy__clip_fraction_{side}" for side in ("low", "high", "dual"))
CORRECTED = "policy__correction_mean"
TRUNCATED, ZERO_VARIANCE = "completions__truncated_fraction", "reward__zero_variance_fraction"
MISMATCH, DIFFERENCE = "Sampler and trainer disagree", "rollout__sampler_scorer_logprob_diff_mean"


@pytest.mark.parametrize(
    ("title", "metrics", "harmless"),
    [
        # An update of a step was skipped though a later one was finite.
        (SKIPPED, {"policy__nonfinite_in_a_row": 0, "policy__nonfinite_updates": 1}, {"policy__nonfinite_updates": 0}),
        (SKIPPED, {"policy__nonfinite_in_a_row": 1, "loss": None}, {"policy__grad_norm": 50.0}),
        (SKIPPED, {"value__nonfinite_in_a_row": 1}, {"value__nonfinite_updates": 0}),
        ("Entropy has collapsed", {"policy__entropy": 0.015}, {"policy__entropy": 0.03}),
        (
            SAME,
            {"reward__mean": 0.0, "reward__std": 0.0, ZERO_VARIANCE: 1.0},
            {"reward__std": 0.03, ZERO_VARIANCE: 0.9},
        ),
        (EQUAL, {ZERO_VARIANCE: 0.97}, {ZERO_VARIANCE: 0.9}),
        ("Many answers are truncated", {TRUNCATED: 0.3}, {TRUNCATED: 0.2}),
        ("The policy is far from the initial model", {"policy__kl": 0.8}, {"policy__kl": 0.2}),
        (MOVES, {"policy__ratio_max": 20.0}, {"policy__ratio_max": 5.0}),
        (MOVES, {LOW: 0.2, HIGH: 0.2}, {LOW: 0.1, HIGH: 0.1}),
        (MOVES, {LOW: 0.1, HIGH: 0.1, DUAL: 0.15}, {DUAL: 0.2}),
        (MISMATCH, {DIFFERENCE: 0.05}, {DIFFERENCE: 0.004, "rollout__sampler_scorer_logprob_diff_max": 0.2}),
        # Samples of an older policy differ, and importance weights correct for more.
        (MISMATCH, {DIFFERENCE: 0.05}, {DIFFERENCE: 0.05, "perf__rollout__staleness_max": 1}),
        (MISMATCH, {DIFFERENCE: 0.2, CORRECTED: 1.0}, {DIFFERENCE: 0.05, CORRECTED: 1.0}),
        ("A reward function fails", {"reward__error_count": 3}, {"reward__error_count": 0}),
        ("Every step compiles", {"perf__compilations": 1}, {"perf__compilations": 0}),
    ],
)
def test_each_alert_is_raised_once_and_only_by_its_condition(title, metrics, harmless):
    # These steps come after the steps in which compilation is expected.
    history = after_twenty_healthy_steps(20, **metrics)
    assert titles(history) == [title]
    assert titles(after_twenty_healthy_steps(20, **harmless)) == []
    # The same alerts are raised step by step, and after a resume.
    alerts, watch, resumed = find_alerts(history), AlertMonitor(), AlertMonitor(history[:25])
    assert [alert for record in history for alert in watch.observe(record)] == alerts
    later = [alert for record in history[25:] for alert in resumed.observe(record)]
    assert later == [alert for alert in alerts if alert.step > 25]


def test_one_bad_step_raises_no_alert_but_several_raise_one_that_names_a_setting() -> None:
    (alert,) = find_alerts(after_twenty_healthy_steps(LONG, **{TRUNCATED: 0.5}))
    assert alert.step == 23  # the mean of five steps passes a quarter in the third
    assert "30.0 % of the completions" in alert.text and "rollout.max_new_tokens" in alert.text
    for metrics in ({"completions__truncated_fraction": 0.9}, {"policy__ratio_max": 99.0}, {"policy__kl": 2.0}):
        assert titles(after_twenty_healthy_steps(1, **metrics)) == []


def test_first_steps_without_a_learning_signal_raise_an_alert_at_once() -> None:
    def raised(**metrics: Any) -> list[tuple[int, str]]:
        return [(one.step, one.title) for one in find_alerts([step_record(step, **metrics) for step in range(1, 5)])]

    assert raised(**{TRUNCATED: 0.51}) == [(1, "Many answers are truncated")]
    assert raised(**{ZERO_VARIANCE: 1.0}) == [(1, EQUAL)]
    assert raised(**{ZERO_VARIANCE: 1.0, "reward__mean": 0.0, "reward__std": 0.0}) == [(1, SAME)]
    assert raised(**{TRUNCATED: 0.5, ZERO_VARIANCE: 0.97}) == []
    assert raised(**{ZERO_VARIANCE: 1.0, "returns__mean": 0.5}) == []


def test_an_alert_is_raised_again_only_after_enough_steps_without_its_cause() -> None:
    def skipped(*steps: int) -> list[int]:
        history = [step_record(step, policy__nonfinite_in_a_row=int(step in steps)) for step in range(1, 100)]
        return [alert.step for alert in find_alerts(history)]

    assert skipped(10, 12, 14, 16) == [10]
    assert skipped(10, 10 + REARM_STEPS) == [10]
    assert skipped(10, 11 + REARM_STEPS) == [10, 11 + REARM_STEPS]


def test_low_entropy_of_a_solved_task_raises_no_alert() -> None:
    solved = {"reward__mean": 0.99, "reward__arithmetic__mean": 0.99, "policy__entropy": 0.001}
    assert titles(after_twenty_healthy_steps(LONG, **solved)) == []
    (alert,) = find_alerts(after_twenty_healthy_steps(LONG, **solved, reward__zero_variance_fraction=1.0))
    assert "Nearly every prompt is solved" in alert.text
    for mean, cause in ((0.0, "no answer is correct"), (1.5, "every prompt is solved")):
        (alert,) = find_alerts(after_twenty_healthy_steps(LONG, reward__mean=mean, reward__std=1e-17))
        assert alert.title == SAME and cause in alert.text


def test_a_missing_or_nan_metric_raises_no_alert() -> None:
    for value in (None, "many", [], 10**400, True):
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


def test_falling_accuracy_with_rising_reward_raises_an_over_optimization_alert() -> None:
    history = evaluated({0: 0.6, 20: 0.4, 40: 0.35}, rising)
    (alert,) = find_alerts(history)
    assert (alert.step, alert.title) == (40, FALLS)
    # With more prompts a smaller fall is significant.
    assert titles(evaluated({0: 0.6, 20: 0.55, 40: 0.5}, rising, 1000)) == [FALLS]
    figures = "fell from 60.0 % (step 0) to 35.0 % (step 40), while the mean reward rose from 0.355 to 0.655"
    assert figures in alert.text and "algorithm.beta" in alert.text


@pytest.mark.parametrize(
    ("accuracies", "reward", "num_prompts"),
    [
        ({0: 0.6, 20: 0.65, 40: 0.35}, rising, 100),  # a single low evaluation may be chance
        ({0: 0.6, 20: 0.55, 40: 0.5}, rising, 100),  # within the noise of a hundred prompts
        *(({0: 0.6, 20: 0.55, 40: 0.5}, rising, unknown) for unknown in (None, 0, -1000, "many")),
        ({0: 0.6, 20: 0.4, 40: 0.35}, lambda step: 0.7 - 0.005 * step, 100),  # the reward falls as well
        (
            {0: 0.6, 20: 0.4, 40: 0.35},
            lambda step: 0.5 + 0.1 * (step % 2),
            100,
        ),  # the reward does not rise beyond its noise
        ({0: 60.0, 20: 40.0, 40: 35.0}, rising, 100),  # values of a plug-in, whose noise is unknown
    ],
)
def test_a_random_accuracy_drop_or_one_with_falling_reward_is_not_over_optimization(accuracies, reward, num_prompts):
    assert FALLS not in titles(evaluated(accuracies, reward, num_prompts))


COLLAPSED = {"reward__mean": 0.1, "policy__learning_rate": 3e-3}
COLLAPSE = "The reward has collapsed"


@pytest.mark.parametrize(
    ("sign", "figures"),
    [
        *(({"policy__entropy": 2.0}, "the entropy rose from"), ({"policy__entropy": 1e-3}, "the entropy fell from")),
        ({"policy__kl": 4.0}, "the KL to the initial model rose to 4"),
        ({"policy__grad_norm": 500.0}, "the gradient norm rose from"),
    ],
)
def test_reward_collapse_alert_lists_symptoms_and_learning_rate(sign, figures):
    found = {alert.title: alert for alert in find_alerts(after_twenty_healthy_steps(LONG, **COLLAPSED, **sign))}
    text = found[COLLAPSE].text
    assert "The mean reward of 5 steps fell from 0.8" in text and figures in text
    assert "optimizer.learning_rate, which reached 0.003: lower it to between 0.0003 and 0.001" in text
    # Neither a fall alone nor a sign of too large updates alone is a collapse.
    assert titles(after_twenty_healthy_steps(LONG, **COLLAPSED)) == []
    assert COLLAPSE not in titles(after_twenty_healthy_steps(LONG, **sign))


def test_a_reward_collapse_in_the_first_update_raises_an_alert() -> None:
    first = step_record(1, reward__mean=0.4, reward__std=0.49, policy__entropy=0.2)
    rest = [step_record(step, reward__mean=0.0, reward__std=0.0, policy__entropy=0.001) for step in range(2, 9)]
    (alert,) = [one for one in find_alerts([first, *rest]) if one.title == COLLAPSE]
    assert alert.step == 6 and "fell from 0.4 (up to step 1) to 0, and the entropy fell from 0.2 to 0.001" in alert.text


def test_a_reward_collapse_is_measured_from_the_mean_of_several_steps() -> None:
    def history(num_lucky: int) -> History:
        lucky = [(0.9, 0.1 * i) for i in range(1, num_lucky + 1)]
        steps = [(0.2, 1.0)] * 110 + lucky + [(0.2, 2.0)] * 30
        return [step_record(i, reward__mean=r, policy__entropy=e) for i, (r, e) in enumerate(steps, start=1)]

    assert COLLAPSE not in titles(history(1))
    (alert,) = [alert for alert in find_alerts(history(5)) if alert.title == COLLAPSE]
    # The earlier entropy is the mean over the same five steps.
    assert "fell from 0.76 (up to step 114)" in alert.text and "the entropy rose from 0.4 to 1.7" in alert.text

    def collapses(best: float, later: float, std: float) -> bool:
        history = [step_record(1, reward__mean=best, reward__std=std, policy__entropy=0.2)]
        history += [step_record(step, reward__mean=later, reward__std=std, policy__entropy=2.0) for step in range(2, 9)]
        return COLLAPSE in titles(history)

    assert collapses(-1.0, -3.0, 0.5) and not collapses(-1.0, -1.4, 0.5)
    assert not collapses(0.03, 0.01, 0.17)  # rare successes
