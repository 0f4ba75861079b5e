from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.sample_json import sample_to_record
from app.report.run_files import RunFiles
from app.report.viewer_content import MAX_CHARACTERS, ViewerContent, build_viewer
from tests.episodes import with_turns
from tests.report.run_directories import sample_record, step_record, write_run


def group(group_id: int, rewards: Sequence[float | None]) -> list[dict[str, Any]]:
    return [sample_record(f"p{group_id}/s{i}", group_id=group_id, reward=r) for i, r in enumerate(rewards)]


def viewer(run: Path, num_samples: int) -> ViewerContent:
    files = RunFiles.read(run)
    return build_viewer(files.rollouts, files.evaluations, num_samples=num_samples)


def shown(viewer: ViewerContent) -> list[tuple[str, list[int]]]:
    return [(group["name"], [sample["step"] for sample in group["samples"]]) for group in viewer.groups]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    rollouts = {step: [*group(0, [1.0, 1.0]), *group(1, [0.0, 1.0]), *group(2, [0.5, 1.0])] for step in (1, 2, 3)}
    return write_run(tmp_path / "run", [step_record(1)], rollouts=rollouts)


def test_a_page_that_holds_all_leaves_nothing_out(run: Path) -> None:
    page = viewer(run, 100)
    assert page.num_shown == page.num_read == 18
    assert (page.num_files, page.num_unopened, page.damaged) == (3, 0, [])
    assert [name for name, _ in shown(page)] == ["p1", "p2", "p0"] * 3


def test_siblings_stay_together_newest_first_those_that_differ_most_first(run: Path) -> None:
    assert shown(viewer(run, 8)) == [("p1", [3, 3]), ("p2", [3, 3]), ("p1", [2, 2]), ("p1", [1, 1])]


def test_a_page_never_holds_more_than_it_was_asked_for(run: Path) -> None:
    for num_samples in range(1, 19):
        page = viewer(run, num_samples)
        assert page.num_shown == sum(len(group["samples"]) for group in page.groups) == num_samples


def test_a_long_run_is_opened_at_a_few_steps_with_both_ends(tmp_path: Path) -> None:
    rollouts = {step: group(0, [0.0, 1.0]) for step in range(1, 101)}
    run = write_run(tmp_path / "run", [step_record(1)], rollouts=rollouts)
    page = viewer(run, 10)
    steps = [steps[0] for _, steps in shown(page)]
    assert page.num_unopened == 92 and page.num_read == 16
    assert steps[0] == 100 and len(steps) == 5
    assert shown(viewer(run, 100))[-1] == ("p0", [1, 1])  # fifty files suffice for a hundred samples
    assert viewer(run, 200).num_unopened == 0


def test_evaluations_are_shown_prompt_by_prompt_changed_grades_first(tmp_path: Path) -> None:
    def evaluation(*rewards: float) -> list[dict[str, Any]]:
        return [sample_record(f"q{i}/s0", group_id=i, reward=reward) for i, reward in enumerate(rewards)]

    evaluations = {0: evaluation(1, 0, 0), 5: evaluation(1, 0, 1)}
    run = write_run(tmp_path / "run", [step_record(1)], evaluations=evaluations)
    assert shown(viewer(run, 100)) == [("q2", [0, 5]), ("q1", [0, 5]), ("q0", [0, 5])]
    assert shown(viewer(run, 2)) == [("q2", [0, 5])]


def test_evaluations_get_their_share_beside_rollouts(tmp_path: Path) -> None:
    rollouts = {1: [record for i in range(20) for record in group(i, [0, 1])]}
    evaluations = {0: [sample_record(f"q{i}/s0") for i in range(40)]}
    run = write_run(tmp_path / "run", [step_record(1)], rollouts=rollouts, evaluations=evaluations)
    page = viewer(run, 20)
    kinds = [(group["kind"], len(group["samples"])) for group in page.groups]
    assert kinds == [("rollout", 2)] * 7 + [("rollout", 1)] + [("evaluation", 1)] * 5


def test_damaged_lines_are_named_and_passed_over(run: Path) -> None:
    path = run / "rollouts" / "step_000002.jsonl"
    good = sample_record("p9/s0", group_id=9)
    path.write_text("half\n" + json.dumps({"uid": 7}) + "\n[]\n" + json.dumps(good) + "\n" + json.dumps(good)[:50])
    (run / "rollouts" / "step_000001.jsonl").write_bytes(b"\xff\n")
    page = viewer(run, 100)
    assert page.num_read == 7
    assert [problem.split(": ")[0] for problem in page.damaged] == [
        f"{run / 'rollouts' / 'step_000001.jsonl'}:1",
        *(f"{path}:{line}" for line in (1, 2, 3, 5)),
    ]
    assert "uid: expected text, got 7" in page.damaged[2]


def test_samples_of_a_diverged_model_and_with_missing_fields_are_shown(run: Path) -> None:
    broken = sample_record("p/s0", reward=None, rewards={"a": None}, advantages=[None, 1.0])
    bare = {"uid": "odd", "completion": "x", "reward": 10**400, "advantages": "?", "rewards": []}
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(broken) + "\n" + json.dumps(bare) + "\n")
    by_uid = {sample["uid"]: sample for group in viewer(run, 100).groups for sample in group["samples"]}
    assert by_uid["p/s0"]["reward"] is by_uid["p/s0"]["advantage"] is None and by_uid["p/s0"]["rewards"] == {"a": None}
    assert by_uid["odd"]["tokens"] is None and by_uid["odd"]["reward"] is by_uid["odd"]["advantage"] is None


@pytest.mark.parametrize(
    ("finish_reason", "end"), [("stop", "complete"), ("length", "truncated"), ("dropped:reward", "dropped")]
)
def test_only_what_met_the_limit_of_tokens_is_cut(run: Path, finish_reason: str, end: str) -> None:
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(sample_record("p/s0", finish_reason=finish_reason)) + "\n")
    (sample,) = viewer(run, 1).groups[0]["samples"]
    assert (sample["finish"], sample["end"]) == (finish_reason, end)


def test_long_texts_are_bounded(run: Path) -> None:
    long = sample_record("p/s0", "x" * 50_000, prompt="y" * 50_000)
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(long) + "\n")
    (first, *_) = viewer(run, 1).groups
    (sample,) = first["samples"]
    assert sample["completion"] == "x" * MAX_CHARACTERS + " … (30,000 more characters)"
    assert len(first["prompt"]) < MAX_CHARACTERS + 50


def test_a_chat_is_shown_with_its_roles(run: Path) -> None:
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5 + 7 = ?"}]
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(sample_record("p/s0", prompt=chat)) + "\n")
    assert viewer(run, 1).groups[0]["prompt"] == "system: Add.\n\nuser: 5 + 7 = ?"


def test_turns_are_shown_with_what_answered_them(run: Path) -> None:
    played = with_turns([(1, 2), (2, 0)], [0.5, 1.0], reward=1.5, advantages=np.array([2, 0, 0, 1, 1], np.float32))
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(sample_to_record(played)) + "\n")
    (sample,) = viewer(run, 1).groups[0]["samples"]
    assert sample["episode_end"] == "terminated"
    first, last = sample["turns"]
    assert first == {
        "start": 0,
        "end": 1,
        "text": "turn 0",
        "messages": [{"role": "tool", "content": "observation 0"}],
        "reward": 0.5,
        "advantage": 2.0,
    }
    assert (last["start"], last["end"], last["messages"], last["advantage"]) == (3, 5, [], 1.0)


@pytest.mark.parametrize("episode", [3, {"turns": 1}, {"turns": [1, {"start": "0"}]}])
def test_an_episode_that_cannot_be_read_leaves_the_completion(run: Path, episode: Any) -> None:
    path = run / "rollouts" / "step_000003.jsonl"
    path.write_text(json.dumps(sample_record("p/s0", episode=episode)) + "\n")
    (sample,) = viewer(run, 1).groups[0]["samples"]
    assert "turns" not in sample and sample["completion"] == "12"
