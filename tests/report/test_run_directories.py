"""Tests reading complete and damaged run directories, and the choice of samples for the viewer."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from app.records.sample_json import sample_to_record
from app.records.shared_rows import share_rows
from app.report.run_files import NonDefaultSetting, RunFiles
from app.report.viewer_content import MAX_CHARACTERS, ViewerContent, build_viewer
from settings import InputError, load
from settings.loading.printing import from_yaml
from tests.episodes import with_turns
from tests.program import digest_of, here
from tests.report.run_directories import SMALL_HISTORY, sample_record, step_record, write_run

STEPS = [step_record(1), step_record(2)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", STEPS)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("settings.yaml", None, "contains no settings.yaml, so it is not a run directory"),
        ("metrics.jsonl", None, "has no finished training step yet"),
        ("metrics.jsonl", b'{"step": 0, "eval/accuracy": 0.5}\n', "has no finished training step yet"),
        ("metrics.jsonl", b'{"step": 1, "lo\n{"step": 1, "reward/mean": 1}\n', "metrics.jsonl:1: not JSON"),
        ("metrics.jsonl", b'{"loss": 1.0}\n', "metrics.jsonl:1: expected an integer `step`, got None"),
        ("metrics.jsonl", b"\x00\xff\n", "metrics.jsonl:1: not"),
        ("settings.yaml", b"run: [\n", "settings.yaml:2:1: not valid YAML"),
        ("settings.yaml", b"\xff\xfe", "settings.yaml:1: not UTF-8"),
    ],
)
def test_a_run_directory_that_cannot_be_reported_is_refused_and_unchanged(run, file, content, message):
    if content is None:
        (run / file).unlink()
    else:
        (run / file).write_bytes(content)
    before = digest_of(run)
    result = here("report", run)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr and str(run) in result.stderr
    assert digest_of(run) == before


def test_error_about_a_path_without_a_run_says_what_the_path_is(run: Path) -> None:
    paths = {
        "../missing": "does not exist",
        "metrics.jsonl": "is a file",
        "..": "; give a run in it, such as run$",
    }
    for path, message in paths.items():
        with pytest.raises(InputError, match=message):
            RunFiles.read((run / path).resolve())


def test_incomplete_lines_damaged_sessions_and_partial_files_are_skipped(tmp_path: Path) -> None:
    samples = {step: [sample_record("p/s0")] for step in (10, 2)}
    run = write_run(tmp_path / "run", STEPS, rollouts=samples)
    assert RunFiles.read(run).settings_history.sessions == []
    (run / "rollouts" / ".step_000003.jsonl.77.partial").write_text("{")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    (run / "sessions.jsonl").write_text('{"processes": 4}\nhalf\n{"processes": 2}\n')
    files = RunFiles.read(run)
    assert [record["step"] for record in files.history] == [1, 2]
    assert list(files.rollouts) == [2, 10]
    assert files.settings_history.sessions == [{"processes": 4}, {"processes": 2}]
    assert files.gaps == ["sessions.jsonl has no valid settings in line 1, 2, 3; other lines are used instead"]


def test_non_default_settings_are_listed_with_their_origin(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS, settings=("rollout.group_size=4", "run.seed=0"))
    chosen = {setting.name: setting for setting in RunFiles.read(run).non_default_settings()}
    assert chosen["rollout.group_size"] == NonDefaultSetting("rollout.group_size", 4, 8, "set")
    preset = "yaml:settings/presets/quickstart.yaml"
    assert chosen["optimizer.beta2"].origin.startswith(preset)
    assert chosen["data.eval_split"] == NonDefaultSetting("data.eval_split", "test", None, "derived")
    # A setting at its default is omitted even if it was set, and so is an inherited default.
    assert not {"run.seed", "model.path", "score.policy.rows_per_device"} & chosen.keys()


def test_printed_settings_are_read_back_with_their_provenance() -> None:
    overrides = ["data.system_prompt='say  # \"why\"'", "run.name=a", "reward.functions=[gsm8k, arithmetic_format]"]
    resolved = load(None, overrides, {})
    read = from_yaml(resolved.to_yaml().encode(), name="settings.yaml")
    assert {name: origin for name, (_, origin) in read.items()} == resolved.provenance
    assert read["data.system_prompt"][0] == 'say  # "why"'
    assert read["reward.functions"][0] == [{"name": name, "weight": 1.0} for name in ("gsm8k", "arithmetic_format")]
    content = b"logging:\n  colour: red  # set\nnovel: {a: 1}  # default\n"
    assert from_yaml(content, name="s") == {"logging.colour": ("red", "set"), "novel.a": (1, "default")}
    with pytest.raises(InputError, match="s: the file is empty"):
        from_yaml(b"", name="s")


def group(group_id: int, rewards: Sequence[float | None]) -> list[dict[str, Any]]:
    return [sample_record(f"p{group_id}/s{i}", group_id=group_id, reward=r) for i, r in enumerate(rewards)]


def viewer(run: Path, num_samples: int) -> ViewerContent:
    files = RunFiles.read(run)
    return build_viewer(files.rollouts, files.evaluations, num_samples=num_samples)


def shown(viewer: ViewerContent) -> list[tuple[str, list[int]]]:
    return [(group["name"], [sample["step"] for sample in group["samples"]]) for group in viewer.groups]


@pytest.fixture
def sampled_run(tmp_path: Path) -> Path:
    rollouts = {step: [*group(0, [1.0, 1.0]), *group(1, [0.0, 1.0]), *group(2, [0.5, 1.0])] for step in (1, 2, 3)}
    return write_run(tmp_path / "run", SMALL_HISTORY, rollouts=rollouts)


def test_viewer_shows_the_requested_number_of_samples_newest_first(sampled_run: Path) -> None:
    whole = viewer(sampled_run, 100)
    assert (whole.num_shown, whole.num_read, whole.num_files, whole.num_unopened, whole.damaged) == (18, 18, 3, 0, [])
    assert [name for name, _ in shown(whole)] == ["p1", "p2", "p0"] * 3
    assert shown(viewer(sampled_run, 8)) == [("p1", [3, 3]), ("p2", [3, 3]), ("p1", [2, 2]), ("p1", [1, 1])]
    for num_samples in (1, 2, 5, 9, 17):
        page = viewer(sampled_run, num_samples)
        assert page.num_shown == sum(len(group["samples"]) for group in page.groups) == num_samples


def test_viewer_samples_steps_of_long_runs_including_the_first_and_last(tmp_path: Path) -> None:
    rollouts = {step: group(0, [0.0, 1.0]) for step in range(1, 101)}
    run = write_run(tmp_path / "run", SMALL_HISTORY, rollouts=rollouts)
    page = viewer(run, 10)
    steps = [steps[0] for _, steps in shown(page)]
    assert page.num_unopened == 92 and page.num_read == 16
    assert steps[0] == 100 and len(steps) == 5
    assert shown(viewer(run, 100))[-1] == ("p0", [1, 1])  # fifty files suffice for a hundred samples
    assert viewer(run, 200).num_unopened == 0


def test_viewer_groups_evaluations_by_prompt_with_changed_grades_first(tmp_path: Path) -> None:
    def evaluation(*rewards: float) -> list[dict[str, Any]]:
        return [sample_record(f"q{i}/s0", group_id=i, reward=reward) for i, reward in enumerate(rewards)]

    evaluations = {0: evaluation(1, 0, 0), 5: evaluation(1, 0, 1)}
    run = write_run(tmp_path / "run", SMALL_HISTORY, evaluations=evaluations)
    assert shown(viewer(run, 100)) == [("q2", [0, 5]), ("q1", [0, 5]), ("q0", [0, 5])]
    assert shown(viewer(run, 2)) == [("q2", [0, 5])]
    # Next to rollouts, evaluations get a quarter of the page.
    rollouts = {1: [record for i in range(20) for record in group(i, [0, 1])]}
    evaluations = {0: [sample_record(f"q{i}/s0") for i in range(40)]}
    both = write_run(tmp_path / "both", SMALL_HISTORY, rollouts=rollouts, evaluations=evaluations)
    kinds = [(group["kind"], len(group["samples"])) for group in viewer(both, 20).groups]
    assert kinds == [("rollout", 2)] * 7 + [("rollout", 1)] + [("evaluation", 1)] * 5


def test_viewer_skips_and_names_damaged_lines(sampled_run: Path) -> None:
    path = sampled_run / "rollouts" / "step_000002.jsonl"
    good = sample_record("p9/s0", group_id=9)
    path.write_text("half\n" + json.dumps({"uid": 7}) + "\n[]\n" + json.dumps(good) + "\n" + json.dumps(good)[:50])
    (sampled_run / "rollouts" / "step_000001.jsonl").write_bytes(b"\xff\n")
    page = viewer(sampled_run, 100)
    assert page.num_read == 7
    assert [problem.split(": ")[0] for problem in page.damaged] == [
        f"{sampled_run / 'rollouts' / 'step_000001.jsonl'}:1",
        *(f"{path}:{line}" for line in (1, 2, 3, 5)),
    ]
    assert "uid: expected text, got 7" in page.damaged[2]


def only_sample(run: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the only group on the page together with its first sample, which is this record."""
    (run / "rollouts" / "step_000003.jsonl").write_text(json.dumps(record) + "\n")
    (found,) = viewer(run, 1).groups
    return found | found["samples"][0]


def test_viewer_shows_samples_with_nulls_and_missing_fields(sampled_run: Path) -> None:
    broken = sample_record("p/s0", reward=None, rewards={"a": None}, advantages=[None, 1.0])
    shown = only_sample(sampled_run, broken)
    assert shown["reward"] is shown["advantage"] is None and shown["rewards"] == {"a": None}
    bare = {"uid": "odd", "completion": "x", "reward": 10**400, "advantages": "?", "rewards": []}
    shown = only_sample(sampled_run, bare)
    assert shown["tokens"] is shown["reward"] is shown["advantage"] is None
    for episode in (3, {"turns": 1}, {"turns": [1, {"start": "0"}]}):
        shown = only_sample(sampled_run, sample_record("p/s0", episode=episode))
        assert "turns" not in shown and shown["completion"] == "12"


def test_viewer_shows_finish_reason_roles_turns_and_shortened_texts(sampled_run: Path) -> None:
    for finish_reason, end in {"stop": "complete", "length": "truncated", "dropped:reward": "dropped"}.items():
        shown = only_sample(sampled_run, sample_record("p/s0", finish_reason=finish_reason))
        assert (shown["finish"], shown["end"]) == (finish_reason, end)
    shown = only_sample(sampled_run, sample_record("p/s0", "x" * 50_000, prompt="y" * 50_000))
    assert shown["completion"] == "x" * MAX_CHARACTERS + " … (30,000 more characters)"
    assert len(shown["prompt"]) < MAX_CHARACTERS + 50
    groups = [sample_record(f"p/s{i}", group_id=i, answer="z" * 50_000) for i in range(2)]
    write_jsonl(sampled_run / "rollouts" / "step_000003.jsonl", [*share_rows(groups)])
    answers = [group["answer"] for group in viewer(sampled_run, 100).groups if group["name"] == "p"]
    assert answers == ["z" * MAX_CHARACTERS + " … (30,000 more characters)"] * 2
    chat = [{"role": "system", "content": "Add."}, {"role": "user", "content": "5 + 7 = ?"}]
    assert only_sample(sampled_run, sample_record("p/s0", prompt=chat))["prompt"] == "system: Add.\n\nuser: 5 + 7 = ?"
    played = with_turns([(1, 2), (2, 0)], [0.5, 1.0], reward=1.5, advantages=np.array([2, 0, 0, 1, 1], np.float32))
    shown = only_sample(sampled_run, sample_to_record(played))
    assert shown["episode_end"] == "terminated"
    first, last = shown["turns"]
    assert first == {
        **{"start": 0, "end": 1, "text": "turn 0", "reward": 0.5, "advantage": 2.0},
        **{"messages": [{"role": "tool", "content": "observation 0"}], "metrics": {}},
    }
    assert (last["start"], last["end"], last["messages"], last["advantage"]) == (3, 5, [], 1.0)
