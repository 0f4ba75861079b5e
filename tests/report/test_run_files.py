from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.report.run_files import NonDefaultSetting, RunFiles
from settings import InputError, load
from settings.loading.printing import from_yaml
from tests.program import digest_of, here
from tests.report.run_directories import quickstart_history, sample_record, step_record, write_lines, write_run

STEPS = [step_record(1), step_record(2)]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", STEPS)


def remove(path: Path) -> None:
    path.unlink()


def keep_the_first_evaluation_only(metrics: Path) -> None:
    write_lines(metrics, quickstart_history()[:1])


def damage_the_first_line(metrics: Path) -> None:
    metrics.write_text('{"step": 1, "lo\n' + metrics.read_text())


def forget_a_step(metrics: Path) -> None:
    write_lines(metrics, [*STEPS, {"loss": 1.0}])


def write_bytes(metrics: Path) -> None:
    metrics.write_bytes(b"\x00\xff\n")


@pytest.mark.parametrize(
    ("file", "spoil", "message"),
    [
        ("settings.yaml", remove, "holds no settings.yaml, so it is not a run directory"),
        ("metrics.jsonl", remove, "has no finished training step yet"),
        ("metrics.jsonl", keep_the_first_evaluation_only, "has no finished training step yet"),
        ("metrics.jsonl", damage_the_first_line, "metrics.jsonl:1: not JSON"),
        ("metrics.jsonl", forget_a_step, "metrics.jsonl:3: expected an integer `step`, got None"),
        ("metrics.jsonl", write_bytes, "metrics.jsonl:1: not"),
        ("settings.yaml", lambda path: path.write_text("run: [\n"), "settings.yaml:2:1: not valid YAML"),
        ("settings.yaml", lambda path: path.write_bytes(b"\xff\xfe"), "settings.yaml:1: not UTF-8"),
    ],
)
def test_a_directory_that_cannot_be_reported_is_one_error_and_nothing_is_harmed(
    run: Path, file: str, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(run / file)
    before = digest_of(run)
    result = here("report", run)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr and str(run) in result.stderr
    assert digest_of(run) == before


def test_no_directory_and_a_file_and_a_folder_of_runs_are_told_apart(run: Path) -> None:
    assert "does not exist" in here("report", run.parent / "missing").stderr
    assert "is a file" in here("report", run / "metrics.jsonl").stderr
    assert "not a run directory; it holds the runs run\n" in here("report", run.parent).stderr


def test_a_line_that_is_being_written_is_left_out(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [record["step"] for record in RunFiles.read(run).history] == [1, 2]


def test_a_damaged_session_is_passed_over_and_none_is_no_error(run: Path) -> None:
    assert RunFiles.read(run).settings_history.sessions == []
    (run / "sessions.jsonl").write_text('{"processes": 4}\nhalf\n{"processes": 2}\n')
    assert RunFiles.read(run).settings_history.sessions == [{"processes": 4}, {"processes": 2}]
    assert RunFiles.read(run).gaps == ["sessions.jsonl has no valid settings in line 1, 2, 3; others are taken instead"]


def test_sample_files_are_found_by_step_and_others_are_left_alone(tmp_path: Path) -> None:
    samples = {step: [sample_record("p/s0")] for step in (10, 2)}
    run = write_run(tmp_path / "run", STEPS, rollouts=samples)
    (run / "rollouts" / ".step_000003.jsonl.77.partial").write_text("{")
    assert list(RunFiles.read(run).rollouts) == [2, 10]


def test_only_settings_that_somebody_chose_are_named_with_what_chose_them(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS, settings=("rollout.group_size=4", "run.seed=0"))
    chosen = {setting.name: setting for setting in RunFiles.read(run).non_default_settings()}
    assert chosen["rollout.group_size"] == NonDefaultSetting("rollout.group_size", 4, 8, "set")
    preset = "yaml:settings/presets/quickstart.yaml"
    assert chosen["optimizer.beta2"].origin.startswith(preset)
    assert chosen["data.eval_split"] == NonDefaultSetting("data.eval_split", "test", None, "derived")
    # At its default, though somebody said so; and an inherited default.
    assert not {"run.seed", "model.path", "score.policy.rows_per_device"} & chosen.keys()


def test_what_is_printed_as_yaml_is_read_back_with_its_provenance() -> None:
    overrides = ["data.system_prompt='say  # \"why\"'", "run.name=a", "reward.functions=[gsm8k, arithmetic_format]"]
    resolved = load(None, overrides, {})
    read = from_yaml(resolved.to_yaml().encode(), name="settings.yaml")
    assert {name: origin for name, (_, origin) in read.items()} == resolved.provenance
    assert read["data.system_prompt"][0] == 'say  # "why"'
    assert read["reward.functions"][0] == [
        {"name": "gsm8k", "weight": 1.0},
        {"name": "arithmetic_format", "weight": 1.0},
    ]


def test_settings_of_another_version_are_shown_as_they_are() -> None:
    content = b"logging:\n  colour: red  # set\nnovel: {a: 1}  # default\n"
    assert from_yaml(content, name="s") == {"logging.colour": ("red", "set"), "novel.a": (1, "default")}
    with pytest.raises(InputError, match="s: the file is empty"):
        from_yaml(b"", name="s")
