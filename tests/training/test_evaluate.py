"""Held-out accuracy: which prompts, and what is said of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.flow import Prompt, Sample
from app.jsonl import read_jsonl
from app.reward.outcome import Outcome
from app.reward.weighing import Scored, weigh
from app.training.evaluate import check_best_metric, evaluation_metrics
from app.training.progress import evaluation_line
from settings import InputError
from tests.training.program import metrics_of


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


def judged(samples: list[Sample], judge: str = "arithmetic") -> Scored:
    return weigh(samples, {judge: [Outcome(s.reward) for s in samples]}, {judge: 1.0}, "zero")


def test_accuracy_is_told_by_difficulty() -> None:
    metrics = evaluation_metrics(
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


def test_data_without_difficulty_has_one_accuracy() -> None:
    metrics = evaluation_metrics(judged([graded(False, "3"), graded(True, "2")]))
    assert [name for name in metrics if name.startswith("eval/accuracy")] == ["eval/accuracy"]


def test_a_plug_in_that_judges_knows_no_format() -> None:
    assert evaluation_metrics(judged([graded(True, "2")], "brevity"))["eval/format_rate"] is None


def test_accuracy_is_over_the_answers_that_the_judge_gave_a_value() -> None:
    samples = [graded(True, "2", difficulty=level) for level in (1, 1, 1, 2)]
    outcomes = [Outcome(1.0), Outcome(0.5), Outcome(), Outcome()]
    scored = weigh(samples, {"judge": outcomes}, {"judge": 1.0}, "raise", when_all_abstain=None)
    metrics = evaluation_metrics(scored)
    assert (metrics["eval/accuracy"], metrics["eval/error_count"], scored.problem) == (0.75, 0, None)
    assert (metrics["eval/accuracy/difficulty_1"], metrics["eval/accuracy/difficulty_2"]) == (0.75, None)
    assert metrics["eval/mean_length"] == 2


def test_a_judge_that_abstains_from_everything_leaves_no_accuracy_and_no_error() -> None:
    scored = weigh([graded(True, "2")], {"judge": [Outcome()]}, {"judge": 1.0}, "raise", when_all_abstain=None)
    metrics = evaluation_metrics(scored)
    assert (metrics["eval/accuracy"], metrics["eval/error_count"], scored.problem) == (None, 0, None)
    assert evaluation_line(0, metrics).startswith("evaluation at step 0: accuracy –  truncated 0.0%")


def test_whatever_is_measured_may_choose_the_best_checkpoint_and_nothing_else() -> None:
    samples = [graded(True, "2", difficulty=3), graded(False, "3", difficulty=1)]
    questions = [sample.prompt for sample in samples]
    for name in evaluation_metrics(judged(samples)):
        check_best_metric(name, questions, judge="arithmetic")
    with pytest.raises(InputError, match=r"do not measure 'eval/acuracy'; did you mean eval/accuracy\?"):
        check_best_metric("eval/acuracy", questions, judge="arithmetic")
    levels = "eval/accuracy/difficulty_1, eval/accuracy/difficulty_3"
    for name in ("reward/mean", "eval/accuracy/difficulty_2"):
        with pytest.raises(InputError, match=f"eval/error_count, {levels}"):
            check_best_metric(name, questions, judge="arithmetic")


def test_a_format_that_no_plug_in_knows_chooses_no_checkpoint() -> None:
    check_best_metric("eval/accuracy", prompts(1), judge="brevity")
    with pytest.raises(InputError, match=r"do not measure 'eval/format_rate' where brevity judges \(they"):
        check_best_metric("eval/format_rate", prompts(1), judge="brevity")


def prompts(count: int) -> list[Prompt]:
    return [Prompt(str(i), np.array([1], np.int32), "?", None) for i in range(count)]


def test_each_prompt_is_asked_once_though_the_last_batch_is_filled_up(finished: Path) -> None:
    # 20 prompts in batches of 4 prompts x 4 samples.
    for step in (0, 2, 4):
        records = [record for _, record in read_jsonl(finished / "eval" / f"step_{step:06d}.jsonl")]
        assert len({record["uid"] for record in records}) == len(records) == 20
        by_file = np.mean([record["rewards"]["arithmetic"] for record in records])
        (line,) = [line for line in metrics_of(finished) if line["step"] == step]
        assert line["eval/accuracy"] == by_file


def test_evaluation_asks_the_same_prompts_at_every_step(finished: Path) -> None:
    asked = [
        [record["prompt"] for _, record in read_jsonl(finished / "eval" / f"step_{step:06d}.jsonl")]
        for step in (0, 2, 4)
    ]
    assert asked[0] == asked[1] == asked[2]
