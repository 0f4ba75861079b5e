"""Tests metrics and comparisons of evaluations against hand-computed values and slow oracles."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.evaluation.evaluator import evaluation_metrics
from app.evaluation.metadata import JUDGE, JUDGE_FILE, EvaluationMetadata, write_metadata
from app.evaluation.prompt_metrics import (
    DIFFICULTY,
    NON_BINARY_COUNT,
    check_best_metric,
    estimate_metrics,
    majority_vote_accuracy,
    pass_at_k,
    pass_at_k_sizes,
    prompt_columns,
)
from app.records.identity import CHECKPOINT, PROMPTS
from app.records.jsonl import read_jsonl, write_jsonl
from app.records.sample import DROPPED_PREFIX, Prompt, Sample
from app.records.shared_rows import share_rows
from app.report.confidence_intervals import wilson_interval
from app.reward.aggregate import RewardedSamples, RewardOutcome, aggregate_rewards
from settings import InputError, Settings, load
from tests.program import here, succeeded
from tests.tiny import make_sample


def graded(correct: bool, completion: str, *, stop: bool = True, **extra: int) -> Sample:
    made = make_sample(np.zeros(len(completion) + stop), reward=float(correct))
    prompt = Prompt("p", np.array([1], np.int32), "1 + 1 = ?", "2", extra)
    return replace(made, prompt=prompt, completion=completion, finish_reason="stop" if stop else "length")


def judged(samples: list[Sample], judge: str = "arithmetic") -> RewardedSamples:
    return aggregate_rewards(samples, {judge: [RewardOutcome(s.reward) for s in samples]}, {judge: 1.0}, "zero")


def metrics_by(scored: RewardedSamples, judge: str = "arithmetic", *overrides: str) -> dict[str, float | None]:
    functions = [{"name": judge, "function": "judge.py:judge"}] if judge in ("judge", "brevity") else [judge]
    settings = load(None, [f"reward.functions={functions}", *overrides], {}).settings
    return evaluation_metrics(scored.samples, settings)


def test_evaluation_metrics_of_four_answers_equal_hand_computed_values() -> None:
    samples = [graded(True, "2", difficulty=1)] * 2 + [graded(True, "1+1=2", difficulty=2)]
    samples.append(graded(False, "=+", difficulty=2, stop=False))
    assert not [name for name in metrics_by(judged(make_answers(("2",), difficulty="hard"))) if "difficulty" in name]
    assert metrics_by(judged(samples)) == {
        **{"eval/accuracy": 0.75, "eval/format_rate": 0.5, "eval/truncated_fraction": 0.25},
        **{"eval/mean_length": (2 + 2 + 6 + 2) / 4, "eval/error_count": 0.0, "eval/accuracy/difficulty_1": 1.0},
        "eval/accuracy/difficulty_2": 0.5,
    }


def test_accuracy_excludes_answers_on_which_the_judge_abstains() -> None:
    samples = [graded(True, "2", difficulty=level) for level in (1, 1, 1, 2)]
    outcomes = [RewardOutcome(1.0), RewardOutcome(0.5), RewardOutcome(), RewardOutcome()]
    scored = aggregate_rewards(samples, {"judge": outcomes}, {"judge": 1.0}, "raise", when_all_abstain=None)
    metrics = metrics_by(scored, "judge")
    assert (metrics["eval/accuracy"], metrics["eval/error_count"], scored.fatal_error) == (0.75, 0, None)
    assert (metrics["eval/accuracy/difficulty_1"], metrics["eval/accuracy/difficulty_2"]) == (0.75, None)
    assert metrics["eval/mean_length"] == 2


def is_measured(name: str, questions: list[Prompt], judge: str = "arithmetic") -> None:
    chosen = {"checkpoint": {"best_metric": name}, "reward": {"functions": [judge]}}
    check_best_metric(Settings.model_validate(chosen), questions)


def test_only_measured_metrics_can_choose_the_best_checkpoint() -> None:
    samples = [graded(True, "2", difficulty=3), graded(False, "3", difficulty=1)]
    questions = [sample.prompt for sample in samples]
    for name in metrics_by(judged(samples)):
        is_measured(name, questions)
    with pytest.raises(InputError, match=r"do not measure 'eval/acuracy'; .*; did you mean eval/accuracy\?$"):
        is_measured("eval/acuracy", questions)
    levels = "eval/accuracy/difficulty_1 or eval/accuracy/difficulty_3"
    for name in ("reward/mean", "eval/accuracy/difficulty_2"):
        with pytest.raises(InputError, match=f"eval/error_count, {levels}"):
            is_measured(name, questions)
    is_measured("eval/accuracy", questions, judge="math_verify")
    with pytest.raises(InputError, match=r"do not measure 'eval/format_rate' when math_verify grades; choose"):
        is_measured("eval/format_rate", questions, judge="math_verify")


def make_answers(*answers: tuple[str, ...], **extra: object) -> list[Sample]:
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


def test_metrics_of_several_samples_per_prompt_equal_hand_computed_values() -> None:
    samples = make_answers(("2", "2", "3", "2"), ("3", "3", "2", "?"), ("2", "5", "?", "cut"), ("9", "8", "7", "6"))
    figures = estimate_metrics(table_of(samples, 4), num_samples=4)
    values = {name: figure.value for name, figure in figures.items()}
    assert values["eval/accuracy"] == pytest.approx((3 + 1 + 1 + 0) / 16)
    assert values["eval/pass@2"] == pytest.approx((1 + 1 / 2 + 1 / 2 + 0) / 4)
    assert values["eval/pass@4"] == pytest.approx(3 / 4)
    # The third prompt's vote is a tie of two answers; an answer that is not a number has no vote.
    assert values["eval/maj@4"] == pytest.approx((1 + 0 + 1 / 2 + 0) / 4)
    assert values["eval/truncated_fraction"] == pytest.approx(1 / 16)


def test_a_sample_that_could_not_be_generated_has_no_majority_vote() -> None:
    samples = make_answers(("3", "3", "2", "2"), ("2", "3", "?", "?"))
    assert table_of(samples, 4)["eval/maj@4"].tolist() == [1 / 2, 1 / 2]
    # Without the first sample, neither prompt has a tie.
    broken = [s if s.sample_index else replace(s, finish_reason=f"{DROPPED_PREFIX}non-finite logits") for s in samples]
    assert table_of(broken, 4)["eval/maj@4"].tolist() == [1, 0]


def test_confidence_intervals_are_computed_over_prompts() -> None:
    samples = make_answers(*[("2",) * 8] * 10, *[("3",) * 8] * 10)
    figures = estimate_metrics(table_of(samples, 8), num_samples=8)
    assert figures["eval/accuracy"].interval == pytest.approx(wilson_interval(0.5, 20))
    one = estimate_metrics(table_of(make_answers(("2", "3")), 2), num_samples=2)["eval/accuracy"]
    assert (one.value, one.interval) == (0.5, None)


def test_confidence_intervals_count_independent_draws_of_k_samples() -> None:
    """If half of every prompt's samples are correct, prompts do not differ, so each sample counts as one trial."""
    halves = np.full(6, 0.5)
    names = ("eval/accuracy", "eval/pass@2", "eval/pass@4", "eval/pass@8", "eval/maj@8")
    table = {**dict.fromkeys(names, halves), DIFFICULTY: np.full(6, np.nan), NON_BINARY_COUNT: np.zeros(6)}
    figures = estimate_metrics(table, num_samples=8)
    for name, trials in zip(names, (8, 4, 2, 1, 1), strict=True):
        assert figures[name].interval == pytest.approx(wilson_interval(0.5, 6 * trials)), name


def test_pass_at_k_and_votes_need_values_of_0_or_1() -> None:
    samples = [replace(sample, reward=0.25 * i) for i, sample in enumerate(make_answers(("a", "b"), ("c", "d")))]
    figures = estimate_metrics(table_of(samples, 2, "brevity"), num_samples=2)
    assert figures["eval/pass@2"] == (None, None)
    assert "eval/maj@2" not in figures
    assert figures["eval/accuracy"].value == pytest.approx(0.375)
    right = [replace(sample, reward=float(i == 0)) for i, sample in enumerate(make_answers(("a", "b"), ("c", "d")))]
    assert estimate_metrics(table_of(right, 2, "brevity"), num_samples=2)["eval/pass@2"].value == 0.5


@pytest.mark.parametrize("num_samples", [1, 5, 8])
def test_pass_at_k_equals_the_share_of_subsets_with_a_right_sample(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        right = [i < num_right for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            expected = np.mean([any(chosen) for chosen in combinations(right, k)])
            assert pass_at_k(num_right, num_samples, k) == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match=f"pass@9 needs at least 9 samples, got {num_samples}"):
        pass_at_k(1, num_samples, 9)
    # Powers of two and all samples; pass@1 is the accuracy.
    assert [pass_at_k_sizes(n) for n in (1, 2, 6, 8)] == [[], [2], [2, 4, 6], [2, 4, 8]]


def test_majority_vote_breaks_ties_at_random() -> None:
    for votes, share in (
        *(([7, 7, 3], 1.0), ([3, 3, 7], 0.0), ([7, 3], 0.5), ([7, 3, 5], 1 / 3), ([3, 5], 0.0)),
        *(([7, None, None, None], 1.0), ([None, None], 0.0)),
    ):
        assert majority_vote_accuracy(votes, 7) == pytest.approx(share)


def write(
    path: Path,
    answers: Sequence[Sequence[str]],
    *,
    judge: str | None = "arithmetic",
    facts: Mapping[str, Any] | None = None,
    **changed: Any,
) -> Path:
    """Writes samples of prompts with the answer 2, judged by whether their answer is 2."""
    records = [
        {
            **{"uid": f"q/{place}/s{index}", "group_id": place, "sample_index": index, "policy_version": 0},
            **{"prompt": "1 + 1 = ?", "completion": answer, "answer": "2", "finish_reason": "stop"},
            **{"prompt_token_ids": [1], "completion_token_ids": [1] * len(answer)},
            **{"behavior_logprobs": [-0.5] * len(answer), "columns": {"difficulty": 1 + place % 2, "tests": "x" * 300}},
            **({} if judge is None else {"rewards": {judge: float(answer == "2")}}),
            **changed,
        }
        for place, of_prompt in enumerate(answers)
        for index, answer in enumerate(of_prompt)
    ]
    write_jsonl(path, share_rows(records))
    if facts is not None:
        known = {JUDGE: judge, JUDGE_FILE: None, CHECKPOINT: "none", "eval.temperature": 0.0, **facts}
        write_metadata(path, EvaluationMetadata("tiny", facts.get("step"), "rows.jsonl", known))
    return path


BEFORE = [("3",)] * 6 + [("2",)] * 2 + [("5",)] * 4
AFTER = [("2",)] * 6 + [("2",), ("7",)] + [("5",)] * 4


def compared(*arguments: str | Path) -> dict[str, Any]:
    result = succeeded(here("evaluate", "--json", "--compare", *arguments))
    return json.loads(result.stdout)


def refused(*arguments: str | Path) -> str:
    result = here("evaluate", "--compare", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    return result.stderr


def test_right_and_wrong_answers_are_compared_by_mcnemars_test(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    folder.mkdir()
    before, after = write(folder / "b.jsonl", BEFORE), write(folder / "a.jsonl", AFTER)
    found = compared(before, after)
    assert [note.partition(" does")[0] for note in found["notes"]] == ["b.jsonl.facts.json", "a.jsonl.facts.json"]
    (tmp_path / "settings.yaml").touch()
    assert not compared(before, after)["notes"], "both are of one run"
    assert (found["better"], found["worse"], found["alike"]) == (6, 1, 5)
    # Two-sided probability that at most one of 7 fair coins shows the rarer side: 2 * (1 + 7) / 128.
    assert (found["p"], found["test"]) == (0.125, "exact McNemar test")
    accuracy = found["metrics"]["eval/accuracy"]
    assert accuracy["before"]["value"] == pytest.approx(2 / 12)
    assert accuracy["before"]["interval"] == pytest.approx(wilson_interval(2 / 12, 12))
    assert accuracy["after"]["value"] == pytest.approx(7 / 12)
    changes = np.array([1.0] * 6 + [0.0, -1.0] + [0.0] * 4)
    reach = 2.20099 * changes.std(ddof=1) / np.sqrt(12)
    assert accuracy["difference"]["value"] == pytest.approx(5 / 12)
    expected = (5 / 12 - reach, 5 / 12 + reach)
    assert accuracy["difference"]["interval"] == pytest.approx(expected, rel=2e-3)
    # Prompts are matched by name and not by place.
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(reversed(after.read_text().splitlines(keepends=True))))
    same = {"after": "", "notes": ""}
    assert {**compared(before, turned), **same} == {**found, **same}
    level = found["metrics"]["eval/accuracy/difficulty_2"]["difference"]
    assert level["value"] == pytest.approx(changes[1::2].mean())


def test_evaluations_with_several_samples_are_compared_by_prompt(tmp_path: Path) -> None:
    unreadable = [write(tmp_path / f"{name}.jsonl", [("2", "3"), ("3", "3")], answer="?") for name in "ab"]
    found = compared(*unreadable)["metrics"]
    assert "eval/pass@2" in found and "eval/maj@2" not in found
    before = write(tmp_path / "b.jsonl", [("2", "3"), ("3", "3"), ("2", "2")])
    after = write(tmp_path / "a.jsonl", [("2", "2"), ("3", "2"), ("2", "2")])
    found = compared(before, after)
    assert (found["better"], found["worse"], found["test"]) == (2, 0, "exact sign test over prompts")
    assert found["p"] == 0.5
    assert found["metrics"]["eval/pass@2"]["difference"]["value"] == pytest.approx(1 / 3)
    assert found["metrics"]["eval/maj@2"]["before"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_comparison_prints_a_table_and_draws_a_picture(tmp_path: Path) -> None:
    before = write(tmp_path / "b.jsonl", BEFORE, facts={"eval.temperature": 0.0, PROMPTS: "12 prompts, a"})
    after = write(
        tmp_path / "a.jsonl", AFTER, facts={"eval.temperature": 0.7, CHECKPOINT: "step 9", "step": 9, JUDGE_FILE: "b"}
    )
    picture = tmp_path / "p.png"
    result = here("evaluate", "--compare", before, after, "--picture", picture)
    assert (result.exit_code, result.stderr) == (0, f"note: --picture: written to {picture}\n")
    lines = result.stdout.splitlines()
    assert lines[:2] == [f"before  tiny ({before})", f"after   tiny, step 9 ({after})"]
    (row,) = [line for line in lines if line.startswith("accuracy ")]
    assert "16.7 %" in row and "58.3 %" in row and "+41.7 pp" in row
    assert "6 prompts better, 1 worse, 5 equal: p = 0.12 (exact McNemar test)" in lines
    assert "note: eval.temperature was 0.0 and is now 0.7" in lines
    assert "note: the judge's file was None and is now b" in lines
    assert "note: the prompts differ in their tokens or in other columns" in lines
    assert not [line for line in lines if "the checkpoint" in line]
    assert picture.read_bytes().startswith(b"\x89PNG")
    here("evaluate", "--compare", before, after, "--picture", tmp_path / "same.png")
    assert (tmp_path / "same.png").read_bytes() == picture.read_bytes()


def test_comparison_counts_reward_failures_instead_of_averaging_them(tmp_path: Path) -> None:
    before, after = write(tmp_path / "b.jsonl", BEFORE), write(tmp_path / "a.jsonl", BEFORE)
    for path, failed in ((before, {3}), (after, {3, 4, 9})):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        write_jsonl(
            path, [{**r, "reward_errors": {"arithmetic": "?"}} if r["group_id"] in failed else r for r in records]
        )
    errors = compared(before, after)["metrics"]["eval/error_count"]
    expected = {"before": 1, "after": 3, "difference": 2}
    assert errors == {end: {"value": value, "interval": None} for end, value in expected.items()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answers": AFTER[:11]}, "have different prompts, 1 only in the first (such as q/11); evaluate"),
        ({"prompt": "2 + 0 = ?"}, "come from different data: the question or answer of q/0 differs"),
        ({"judge": "gsm8k"}, "graded by different functions: arithmetic and gsm8k"),
        ({"judge": None}, "a.jsonl has no values; use a file from grpo evaluate --out"),
        ({"rewards": {"a": 1, "b": 0}}, "a.jsonl has the values of a and b"),
        ({"answers": [*AFTER[:11], ("2", "2")]}, "is incomplete: expected each of the samples 0 to 1 of q/0 once"),
        ({"answers": [one * 2 for one in AFTER]}, "eval.num_samples is 1 in the first and 2 in the second. The"),
    ],
)
def test_evaluation_files_that_cannot_be_compared_are_refused(
    tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    facts = {} if "facts" in changed else None
    before = write(tmp_path / "b.jsonl", BEFORE, facts=facts)
    after = write(tmp_path / "a.jsonl", **{"answers": AFTER, **changed})
    assert message in refused(before, after, "--picture", tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("facts", [{JUDGE: None}, []])
def test_damaged_metadata_of_an_evaluation_is_refused(tmp_path: Path, facts: Any) -> None:
    before, after = write(tmp_path / "b.jsonl", BEFORE, facts={}), write(tmp_path / "a.jsonl", AFTER, facts={})
    damaged = tmp_path / "a.jsonl.facts.json"
    damaged.write_text(json.dumps({**json.loads(damaged.read_text()), "facts": facts}))
    message = refused(before, after)
    assert f"{damaged}: cannot be read as the metadata of an evaluation" in message and "facts" in message


def test_plug_in_values_are_compared_as_means_in_any_order(tmp_path: Path) -> None:
    values = [0.1, 0.2, 0.3]
    assert sum(values) != sum(reversed(values))
    before, after = (write(tmp_path / name, [("2",) * 3] * 20, judge="brevity") for name in ("b.jsonl", "a.jsonl"))
    for path, given in ((before, values), (after, values[::-1])):
        records = [{**record, "rewards": {"brevity": given[record["sample_index"]]}} for _, record in read_jsonl(path)]
        write_jsonl(path, records)
    found = compared(before, after)
    assert (found["better"], found["worse"], found["alike"], found["p"]) == (0, 0, 20, 1.0)
    assert found["metrics"]["eval/accuracy"]["difference"]["value"] == 0
    result = succeeded(here("evaluate", "--compare", before, after, "--picture", tmp_path / "p.png"))
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("accuracy ")]
    assert "0.200" in row and "%" not in row
