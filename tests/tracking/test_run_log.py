from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.checkpoint.train_progress import ProgressRecord
from app.records.run_directory import RunDirectory, check_run_directory
from app.tracking.run_log import WANDB_SECTIONS, RunLog
from settings import Settings, load
from tests.program import DEADLINE_S, metrics_of, settings, started, train_here

CANARY = "CANARY0123456789abcdef0123456789abcdef01"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def opened(run: RunDirectory, last_step: int | None = None) -> RunLog:
    return RunLog(run, load(None, [], {}), last_step=last_step, wandb_id=None)


def written(run: RunDirectory, steps: range, last_step: int | None = None) -> RunLog:
    run_log = opened(run, last_step)
    for step in steps:
        run_log.write_metrics(step, {"loss": step / 2})
    run_log.close()
    return run_log


def test_a_line_is_on_disk_as_soon_as_it_is_written(run: RunDirectory) -> None:
    run_log = opened(run)
    run_log.write_metrics(1, {"loss": 0.5, "perf/mfu": None, "policy/entropy": np.float64(2)})
    assert run.metrics_path.read_text() == '{"step": 1, "loss": 0.5, "perf/mfu": null, "policy/entropy": 2.0}\n'
    run_log.close()


def test_a_resumed_journal_goes_on_after_the_checkpoint(run: RunDirectory) -> None:
    written(run, range(6))
    run_log = written(run, range(4, 7), last_step=3)
    assert [line["step"] for line in metrics_of(run.path)] == list(range(7))
    assert run_log.history == metrics_of(run.path)


def test_half_a_line_is_dropped(run: RunDirectory) -> None:
    written(run, range(3))
    with run.metrics_path.open("a") as file:
        file.write('{"step": 3, "lo')
    written(run, range(3, 5), last_step=5)
    assert [line["step"] for line in metrics_of(run.path)] == list(range(5))


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_start_that_is_killed_between_its_files_may_be_repeated(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, num_written: int
) -> None:
    replace, left = os.replace, iter(range(num_written))

    def replace_or_die(source: Path, target: Path) -> None:
        if next(left, None) is None:
            # A killed process leaves its partial file, which an exception removes.
            shutil.copy(source, source.with_name(f".{target.name}.77.partial"))
            raise SystemExit
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_or_die)
    with pytest.raises(SystemExit):
        opened(run)
    assert not run.settings_path.exists()
    check_run_directory(run, "auto")


def test_a_fresh_journal_begins_with_nothing(run: RunDirectory) -> None:
    written(run, range(3))
    assert written(run, range(0)).history == []
    assert run.metrics_path.read_text() == ""


def test_lines_that_cannot_be_read_are_dropped(run: RunDirectory) -> None:
    written(run, range(3))
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    run.metrics_path.write_bytes(b"".join([lines[0], b"\xff\n{}\n", lines[2]]))
    assert [line["step"] for line in written(run, range(0), last_step=2).history] == [0, 2]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), np.float64("nan")])
def test_a_diverged_number_is_null(run: RunDirectory, value: float) -> None:
    run_log = opened(run)
    run_log.write_metrics(1, {"loss": value})
    run_log.close()
    assert metrics_of(run.path) == [{"step": 1, "loss": None}]


def test_only_named_sections_are_uploaded() -> None:
    assert set(Settings.model_fields) - set(WANDB_SECTIONS) == {"logging", "mesh", "plugins", "watchdog"}


def events_of(run: Path) -> list[Any]:
    """Returns all events, in the order in which TensorBoard reads them. Source: the TFRecord format."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="pip install -e '.[tensorboard]'")
    events = []
    for path in sorted((run / "tensorboard").iterdir()):
        content = path.read_bytes()
        while content:
            length = int.from_bytes(content[:8], "little")
            events.append(event_pb2.Event.FromString(content[12 : 12 + length]))
            content = content[16 + length :]
    return events


def scalars_of(run: Path) -> dict[tuple[str, int], float]:
    """Returns the scalars that TensorBoard shows: the start of a session hides those of its step and later."""
    shown: dict[tuple[str, int], float] = {}
    for event in events_of(run):
        if event.HasField("session_log"):
            shown = {key: value for key, value in shown.items() if key[1] < event.step}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                assert (value.tag, event.step) not in shown
                shown[value.tag, event.step] = value.simple_value
    return shown


def test_tensorboard_shows_the_metrics_of_a_resumed_run_once(run: RunDirectory) -> None:
    pytest.importorskip("tensorboardX", reason="pip install -e '.[tensorboard]'")
    resolved = load(None, ["logging.tensorboard=true"], {})
    for steps, last_step in ((range(4), None), (range(2, 5), 1)):
        log = RunLog(run, resolved, last_step=last_step, wandb_id=None)
        for step in steps:
            log.write_metrics(step, {"loss": step / 2, "perf/mfu": None})
        log.close()
        time.sleep(1.1)  # The names of the files hold the second.
    assert scalars_of(run.path) == {("loss", step): step / 2 for step in range(5)}
    texts = [
        one.tensor.string_val[0]
        for event in events_of(run.path)
        for one in event.summary.value
        if one.tag == "settings/text_summary"
    ]
    assert len(texts) == 2 and b"    run:\n      name: " in texts[0]


def test_tensorboard_that_is_not_installed_is_named(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    result = train_here(config, "logging.tensorboard=true")
    assert result.exit_code == 2
    assert "logging.tensorboard = True (from --set): tensorboardX is not installed; run pip install" in result.stderr
    assert not (config.parent / "runs").exists()


@pytest.mark.slow
def test_wandb_offline_needs_no_key_and_no_secret_reaches_a_file(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    program = ("train", "--config", config, *settings("run.steps=1", "logging.wandb_project=tests"))
    secret = {"WANDB_API_KEY": CANARY, "WANDB_MODE": "offline"}
    with started(*program, environ=secret, cwd=config.parent) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, stderr
    (offline,) = (run / "wandb").glob("offline-run-*/run-*.wandb")
    uploaded = offline.read_bytes()
    assert b"prompts_per_step" in uploaded and b"policy/entropy" in uploaded
    assert b"wandb_project" not in uploaded and b"--config" not in uploaded
    assert CANARY not in stdout + stderr
    for path in config.parent.rglob("*"):
        assert not path.is_file() or CANARY.encode() not in path.read_bytes(), path
    wandb_id = ProgressRecord.read(run / "checkpoints" / "1").progress.wandb_id
    assert wandb_id is not None and wandb_id in offline.name


@pytest.mark.parametrize("overrides", [[], ["logging.wandb_project=tests", "logging.wandb_mode=disabled"]])
def test_wandb_is_not_touched_unless_asked_for(
    run: RunDirectory, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    journal = RunLog(run, load(None, overrides, {}), last_step=None, wandb_id=None)
    journal.close()
    assert journal.wandb_id is None
