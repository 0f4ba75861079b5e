"""Tests of held-out accuracy: choice of prompts and metrics."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from app.evaluation.evaluator import evaluation_metrics
from app.evaluation.prompt_metrics import (
    DIFFICULTY,
    NON_BINARY_COUNT,
    check_is_measured,
    estimate_metrics,
    pass_at_k_sizes,
    prompt_columns,
)
from app.records.jsonl import read_jsonl
from app.records.sample import DROPPED_PREFIX, Prompt, Sample
from app.report.confidence_intervals import wilson_interval
from app.reward.aggregate import RewardedSamples, RewardOutcome, aggregate_rewards
from settings import InputError, load
from tests.program import metrics_of


def graded(correct: bool, completion: str, *, stop: bool = True, **extra: int) -> Sample:
    return Sample(
        prompt=Prompt("p", np.array([1], np.int32), "1 + 1 = ?", "2", extra),
        sample_index=0,
        group_id=0,
        completion_ids=np.zeros(len(completion) + stop, np.int32),
        completion=completion,
        behavior_logprobs=np.zeros(len(completion) + stop, np.float32),
        finish_reason="stop" if stop else "length",
        policy_version=0,
        reward=float(correct),
    )


def judged(samples: list[Sample], judge: str = "arithmetic") -> RewardedSamples:
    return aggregate_rewards(samples, {judge: [RewardOutcome(s.reward) for s in samples]}, {judge: 1.0}, "zero")


def metrics_by(scored: RewardedSamples, judge: str = "arithmetic", *overrides: str) -> dict[str, float | None]:
    functions = [{"name": judge, "function": "judge.py:judge"}] if judge in ("judge", "brevity") else [judge]
    settings = load(None, [f"reward.functions={functions}", *overrides], {}).settings
    return evaluation_metrics(scored.samples, settings)


def test_accuracy_is_told_by_difficulty() -> None:
    metrics = metrics_by(
        judged(
            [
                graded(True, "2", difficulty=1),
                graded(True, "2", difficulty=1),
                graded(True, "1+1=2", difficulty=2),
                graded(False, "=+", difficulty=2, stop=False),
            ]
        )
    )
    assert metrics == {
        "eval/accuracy": 0.75,
        "eval/format_rate": 0.5,
        "eval/truncated_fraction": 0.25,
        "eval/mean_length": (2 + 2 + 6 + 2) / 4,
        "eval/error_count": 0.0,
        "eval/accuracy/difficulty_1": 1.0,
        "eval/accuracy/difficulty_2": 0.5,
    }


def test_accuracy_is_over_the_answers_that_the_judge_gave_a_value() -> None:
    samples = [graded(True, "2", difficulty=level) for level in (1, 1, 1, 2)]
    outcomes = [RewardOutcome(1.0), RewardOutcome(0.5), RewardOutcome(), RewardOutcome()]
    scored = aggregate_rewards(samples, {"judge": outcomes}, {"judge": 1.0}, "raise", when_all_abstain=None)
    metrics = metrics_by(scored, "judge")
    assert (metrics["eval/accuracy"], metrics["eval/error_count"], scored.fatal_error) == (0.75, 0, None)
    assert (metrics["eval/accuracy/difficulty_1"], metrics["eval/accuracy/difficulty_2"]) == (0.75, None)
    assert metrics["eval/mean_length"] == 2


is_measured = partial(check_is_measured, setting="checkpoint.best_metric")


def test_whatever_is_measured_may_choose_the_best_checkpoint_and_nothing_else() -> None:
    samples = [graded(True, "2", difficulty=3), graded(False, "3", difficulty=1)]
    questions = [sample.prompt for sample in samples]
    for name in metrics_by(judged(samples)):
        is_measured(name, questions, judge="arithmetic", num_samples=1)
    with pytest.raises(InputError, match=r"do not measure 'eval/acuracy'; .*; did you mean eval/accuracy\?$"):
        is_measured("eval/acuracy", questions, judge="arithmetic", num_samples=1)
    levels = "eval/accuracy/difficulty_1, eval/accuracy/difficulty_3"
    for name in ("reward/mean", "eval/accuracy/difficulty_2"):
        with pytest.raises(InputError, match=f"eval/error_count, {levels}"):
            is_measured(name, questions, judge="arithmetic", num_samples=1)


def test_a_format_that_no_plug_in_knows_chooses_no_checkpoint() -> None:
    is_measured("eval/accuracy", prompts(1), judge="brevity", num_samples=1)
    with pytest.raises(InputError, match=r"do not measure 'eval/format_rate' when brevity judges; choose"):
        is_measured("eval/format_rate", prompts(1), judge="brevity", num_samples=1)


def make_answers(*answers: tuple[str, ...], **extra: object) -> list[Sample]:
    """Returns samples of prompts with the answer 2."""
    return [
        replace(
            graded(answer == "2", answer, stop=answer != "cut"),
            prompt=Prompt(f"p{place}", np.array([1], np.int32), "1 + 1 = ?", "2", extra),
            group_id=place,
            sample_index=index,
        )
        for place, of_prompt in enumerate(answers)
        for index, answer in enumerate(of_prompt)
    ]


def table_of(samples: list[Sample], num_samples: int, judge: str = "arithmetic") -> dict[str, np.ndarray]:
    columns = prompt_columns(judged(samples, judge).samples, judge=judge, num_samples=num_samples)
    return {name: np.asarray(column, np.float64) for name, column in columns.items()}


def test_several_samples_of_a_prompt_tell_what_some_and_most_of_them_are_worth() -> None:
    samples = make_answers(("2", "2", "3", "2"), ("3", "3", "2", "?"), ("2", "5", "?", "cut"), ("9", "8", "7", "6"))
    figures = estimate_metrics(table_of(samples, 4), num_samples=4)
    values = {name: figure.value for name, figure in figures.items()}
    assert values["eval/accuracy"] == pytest.approx((3 + 1 + 1 + 0) / 16)
    assert values["eval/pass@2"] == pytest.approx((1 + 1 / 2 + 1 / 2 + 0) / 4)
    assert values["eval/pass@4"] == pytest.approx(3 / 4)
    # The third is a tie of two; what is no number does not vote.
    assert values["eval/maj@4"] == pytest.approx((1 + 0 + 1 / 2 + 0) / 4)
    assert values["eval/truncated_fraction"] == pytest.approx(1 / 16)


def test_a_sample_that_could_not_be_generated_does_not_vote() -> None:
    samples = make_answers(("3", "3", "2", "2"), ("2", "3", "?", "?"))
    broken = [s if s.sample_index else replace(s, finish_reason=f"{DROPPED_PREFIX}non-finite logits") for s in samples]
    # Ties of two, until the first of each is gone.
    assert table_of(samples, 4)["eval/maj@4"].tolist() == [1 / 2, 1 / 2]
    assert table_of(broken, 4)["eval/maj@4"].tolist() == [1, 0]


def test_intervals_are_over_prompts_and_not_over_samples() -> None:
    samples = make_answers(*[("2",) * 8] * 10, *[("3",) * 8] * 10)
    figures = estimate_metrics(table_of(samples, 8), num_samples=8)
    assert figures["eval/accuracy"].interval == pytest.approx(wilson_interval(0.5, 20))
    one = estimate_metrics(table_of(make_answers(("2", "3")), 2), num_samples=2)["eval/accuracy"]
    assert (one.value, one.interval) == (0.5, None)


def test_a_prompt_is_no_more_certain_than_the_draws_that_its_samples_make() -> None:
    """If half of every prompt's samples are correct, prompts do not differ, so each sample counts as one trial."""
    halves = np.full(6, 0.5)
    names = ("eval/accuracy", "eval/pass@2", "eval/pass@4", "eval/pass@8", "eval/maj@8")
    table = {**dict.fromkeys(names, halves), DIFFICULTY: np.full(6, np.nan), NON_BINARY_COUNT: np.zeros(6)}
    figures = estimate_metrics(table, num_samples=8)
    for name, trials in zip(names, (8, 4, 2, 1, 1), strict=True):
        assert figures[name].interval == pytest.approx(wilson_interval(0.5, 6 * trials)), name


def test_a_judge_of_other_values_than_right_and_wrong_measures_no_passes_and_no_votes() -> None:
    samples = [replace(sample, reward=0.25 * i) for i, sample in enumerate(make_answers(("a", "b"), ("c", "d")))]
    figures = estimate_metrics(table_of(samples, 2, "brevity"), num_samples=2)
    assert figures["eval/pass@2"] == (None, None)
    assert "eval/maj@2" not in figures
    assert figures["eval/accuracy"].value == pytest.approx(0.375)
    right = [replace(sample, reward=float(i == 0)) for i, sample in enumerate(make_answers(("a", "b"), ("c", "d")))]
    assert estimate_metrics(table_of(right, 2, "brevity"), num_samples=2)["eval/pass@2"].value == 0.5


@pytest.mark.parametrize(("num_samples", "counts"), [(1, []), (2, [2]), (6, [2, 4, 6]), (8, [2, 4, 8])])
def test_passes_are_told_of_powers_of_two_and_of_all(num_samples: int, counts: list[int]) -> None:
    assert pass_at_k_sizes(num_samples) == counts


def test_a_column_of_words_is_no_difficulty() -> None:
    assert not [name for name in metrics_by(judged(make_answers(("2",), difficulty="hard"))) if "difficulty" in name]


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), np.array([1], np.int32), "?", None) for i in range(count)]


def test_each_prompt_is_asked_once(finished: Path) -> None:
    for step in (0, 2, 4):
        records = [record for _, record in read_jsonl(finished / "eval" / f"step_{step:06d}.jsonl")]
        assert len({record["uid"] for record in records}) == len(records) == 20
        by_file = np.mean([record["rewards"]["arithmetic"] for record in records])
        (line,) = [line for line in metrics_of(finished) if line["step"] == step]
        assert line["eval/accuracy"] == by_file
