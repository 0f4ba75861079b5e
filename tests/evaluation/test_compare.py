"""Tests of comparisons of two evaluations, and of files that cannot be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.evaluation.metadata import CHECKPOINT, JUDGE, JUDGE_FILE, PROMPTS, EvaluationMetadata, write_metadata
from app.records.jsonl import read_jsonl, write_jsonl
from app.report.confidence_intervals import wilson_interval
from tests.program import here, metrics_of


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
            "uid": f"q/{place}/s{index}",
            "group_id": place,
            "sample_index": index,
            "prompt": "1 + 1 = ?",
            "completion": answer,
            "answer": "2",
            "prompt_token_ids": [1],
            "completion_token_ids": [1] * len(answer),
            "behavior_logprobs": [-0.5] * len(answer),
            "finish_reason": "stop",
            "policy_version": 0,
            "columns": {"difficulty": 1 + place % 2},
            **({} if judge is None else {"rewards": {judge: float(answer == "2")}}),
            **changed,
        }
        for place, of_prompt in enumerate(answers)
        for index, answer in enumerate(of_prompt)
    ]
    write_jsonl(path, records)
    if facts is not None:
        known = {JUDGE: judge, JUDGE_FILE: None, CHECKPOINT: "none", "eval.temperature": 0.0, **facts}
        write_metadata(path, EvaluationMetadata("tiny", facts.get("step"), "rows.jsonl", known))
    return path


BEFORE = [("3",)] * 6 + [("2",)] * 2 + [("5",)] * 4
AFTER = [("2",)] * 6 + [("2",), ("7",)] + [("5",)] * 4


def compared(*arguments: str | Path) -> dict[str, Any]:
    result = here("evaluate", "--json", "--compare", *arguments)
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def refused(*arguments: str | Path) -> str:
    result = here("evaluate", "--compare", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.stderr
    return result.stderr


def test_right_and_wrong_answers_are_told_by_mcnemar(tmp_path: Path) -> None:
    before, after = write(tmp_path / "b.jsonl", BEFORE), write(tmp_path / "a.jsonl", AFTER)
    found = compared(before, after)
    assert (found["better"], found["worse"], found["alike"]) == (6, 1, 5)
    # 7 coins, one or none on the rarer side, twice: 2 * (1 + 7) / 128.
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
    level = found["metrics"]["eval/accuracy/difficulty_2"]["difference"]
    assert level["value"] == pytest.approx(changes[1::2].mean())


def test_prompts_are_matched_by_name_and_not_by_place(tmp_path: Path) -> None:
    before, after = write(tmp_path / "b.jsonl", BEFORE), write(tmp_path / "a.jsonl", AFTER)
    turned = tmp_path / "turned.jsonl"
    turned.write_text("".join(reversed(after.read_text().splitlines(keepends=True))))
    first, second = compared(before, after), compared(before, turned)
    assert {**first, "after": "", "notes": ""} == {**second, "after": "", "notes": ""}


def test_several_samples_are_compared_by_their_prompts(tmp_path: Path) -> None:
    before = write(tmp_path / "b.jsonl", [("2", "3"), ("3", "3"), ("2", "2")])
    after = write(tmp_path / "a.jsonl", [("2", "2"), ("3", "2"), ("2", "2")])
    found = compared(before, after)
    assert (found["better"], found["worse"], found["test"]) == (2, 0, "exact sign test over prompts")
    assert found["p"] == 0.5
    assert found["metrics"]["eval/pass@2"]["difference"]["value"] == pytest.approx(1 / 3)
    assert found["metrics"]["eval/maj@2"]["before"]["value"] == pytest.approx((0.5 + 0 + 1) / 3)


def test_the_table_and_the_picture_are_for_people(tmp_path: Path) -> None:
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
    drawn = picture.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    here("evaluate", "--compare", before, after, "--picture", picture)
    assert picture.read_bytes() == drawn


def test_answers_are_needed_where_samples_vote_and_nowhere_else(tmp_path: Path) -> None:
    before, after = (write(tmp_path / f"{i}.jsonl", rows, answer=None) for i, rows in enumerate((BEFORE, AFTER)))
    assert compared(before, after)["better"] == 6
    several = [write(tmp_path / f"{name}.jsonl", [("2", "3"), ("3", "3")], answer="?") for name in "ab"]
    found = compared(*several)["metrics"]
    assert "eval/pass@2" in found and "eval/maj@2" not in found


def test_failures_are_counted_and_not_averaged(tmp_path: Path) -> None:
    before, after = write(tmp_path / "b.jsonl", BEFORE), write(tmp_path / "a.jsonl", BEFORE)
    for path, failed in ((before, {3}), (after, {3, 4, 9})):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        write_jsonl(
            path, [{**r, "reward_errors": {"arithmetic": "?"}} if r["group_id"] in failed else r for r in records]
        )
    errors = compared(before, after)["metrics"]["eval/error_count"]
    assert {end: errors[end] for end in errors} == {
        "before": {"value": 1, "interval": None},
        "after": {"value": 3, "interval": None},
        "difference": {"value": 2, "interval": None},
    }
    result = here("evaluate", "--compare", before, after)
    assert [line.split() for line in result.stdout.splitlines() if line.startswith("error")] == [
        ["error_count", "1", "3", "+2"]
    ]


def test_files_of_a_run_s_own_evaluations_are_compared_too(finished: Path) -> None:
    found = compared(*(finished / "eval" / f"step_00000{step}.jsonl" for step in (0, 4)))
    accuracies = [line["eval/accuracy"] for line in metrics_of(finished) if "eval/accuracy" in line]
    ends = found["metrics"]["eval/accuracy"]
    assert [ends["before"]["value"], ends["after"]["value"]] == [accuracies[0], accuracies[-1]]
    assert len(found["notes"]) == 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"answers": AFTER[:11]}, "1 are only in the first, 0 only in the second, such as q/11"),
        ({"prompt": "2 + 0 = ?"}, "come from different data: the question or answer of q/0 differs"),
        ({"judge": "gsm8k"}, "judged by different functions: arithmetic and gsm8k"),
        ({"judge": None}, "a.jsonl has no values; use a file from grpo evaluate --out"),
        ({"rewards": {"a": 1, "b": 0}}, "a.jsonl has the values of a, b"),
        ({"answers": [*AFTER[:11], ("2", "2")]}, "is incomplete: q/0 does not have each of the samples 0 to 1 once"),
        (
            {"answers": [(answer, answer) for (answer,) in AFTER]},
            "eval.num_samples is 1 in the first and 2 in the second. The sign test would be biased even for one model; "
            "evaluate one of them again with the eval.num_samples of the other",
        ),
    ],
)
def test_files_that_say_nothing_about_each_other(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    facts = {} if "facts" in changed else None
    before = write(tmp_path / "b.jsonl", BEFORE, facts=facts)
    after = write(tmp_path / "a.jsonl", **{"answers": AFTER, **changed})
    assert message in refused(before, after, "--picture", tmp_path / "p.png")
    assert not (tmp_path / "p.png").exists()


@pytest.mark.parametrize("facts", [{}, {JUDGE: None}, []])
def test_facts_that_are_damaged_are_told(tmp_path: Path, facts: Any) -> None:
    before, after = write(tmp_path / "b.jsonl", BEFORE, facts={}), write(tmp_path / "a.jsonl", AFTER, facts={})
    damaged = tmp_path / "a.jsonl.facts.json"
    damaged.write_text(json.dumps({**json.loads(damaged.read_text()), "facts": facts}))
    message = refused(before, after)
    assert f"{damaged}: cannot be read as the metadata of an evaluation" in message and "facts" in message


def test_a_plug_in_s_values_are_no_shares(tmp_path: Path) -> None:
    values = iter(range(12))
    before = write(tmp_path / "b.jsonl", BEFORE, judge="brevity")
    after = write(tmp_path / "a.jsonl", AFTER, judge="brevity")
    records = [json.loads(line) for line in after.read_text().splitlines()]
    write_jsonl(after, [{**record, "rewards": {"brevity": next(values) / 2}} for record in records])
    result = here("evaluate", "--compare", before, after, "--picture", tmp_path / "p.png")
    assert result.exit_code == 0, result.stderr
    (row,) = [line for line in result.stdout.splitlines() if line.startswith("accuracy ")]
    assert "2.75" in row and "%" not in row


def test_the_order_of_samples_makes_no_prompt_better(tmp_path: Path) -> None:
    values = [0.1, 0.2, 0.3]
    assert sum(values) != sum(reversed(values))
    before, after = (write(tmp_path / name, [("2",) * 3] * 20, judge="mine") for name in ("b.jsonl", "a.jsonl"))
    for path, given in ((before, values), (after, values[::-1])):
        records = [{**record, "rewards": {"mine": given[record["sample_index"]]}} for _, record in read_jsonl(path)]
        write_jsonl(path, records)
    found = compared(before, after)
    assert (found["better"], found["worse"], found["alike"], found["p"]) == (0, 0, 20, 1.0)
    assert found["metrics"]["eval/accuracy"]["difference"]["value"] == 0
