"""Tests the log of a run: metrics, TensorBoard, wandb and traces."""

import gzip
import json
import logging
import os
import shutil
import sys
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from app.checkpoint.train_progress import ProgressRecord
from app.records.run_directory import RunDirectory, check_run_directory
from app.tracking.run_log import WANDB_SECTIONS, RunLog
from app.tracking.timer import StepProfiler
from settings import Settings, load
from tests.program import (
    CANARY,
    DEADLINE_S,
    limited_file_size,
    metrics_of,
    reproducible,
    settings,
    started,
    succeeded,
    train_here,
)


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


def test_metrics_lines_are_flushed_and_a_deleted_file_is_rewritten(run: RunDirectory) -> None:
    run_log = opened(run)
    run_log.write_metrics(1, {"loss": 0.5, "perf/mfu": None, "a": np.float64(2), "b": np.nan, "c": -np.inf})
    # A number that is not finite is written as null.
    line = '{"step": 1, "loss": 0.5, "perf/mfu": null, "a": 2.0, "b": null, "c": null}\n'
    assert run.metrics_path.read_text() == line
    run.metrics_path.unlink()
    for step in (2, 3):
        run_log.write_metrics(step, {"loss": 0.25})
    assert run.metrics_path.read_text() == line + '{"step": 2, "loss": 0.25}\n{"step": 3, "loss": 0.25}\n'
    run_log.close()


def test_a_resumed_log_keeps_the_readable_lines_up_to_the_checkpoint(run, caplog) -> None:
    written(run, range(6))
    run_log = written(run, range(4, 7), last_step=3)
    assert [line["step"] for line in metrics_of(run.path)] == list(range(7))
    assert run_log.history == metrics_of(run.path)
    lines = run.metrics_path.read_bytes().splitlines(keepends=True)
    run.metrics_path.write_bytes(b"".join([lines[0], b"\xff\n{}\n", *lines[2:], b'{"step": 7, "lo']))
    assert [line["step"] for line in written(run, range(7, 8), last_step=9).history] == [0, *range(2, 8)]
    # The file has no last line for the step of the checkpoint only if an evaluation was interrupted.
    assert caplog.messages == [f"{run.metrics_path} has no lines for steps 7 to 9; report and alerts omit them"]
    assert written(run, range(0)).history == []
    assert run.metrics_path.read_text() == ""


@pytest.mark.parametrize("num_written", [0, 1])
def test_a_run_start_killed_between_two_files_can_be_repeated(run, monkeypatch, num_written):
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


def scalars_of(run: Path) -> dict[tuple[str, int], float]:
    """Returns the scalars that TensorBoard shows: the start of a session hides those of its step and later."""
    event_pb2 = pytest.importorskip("tensorboardX.proto.event_pb2", reason="pip install -e '.[tensorboard]'")
    shown: dict[tuple[str, int], float] = {}
    for content in [path.read_bytes() for path in sorted((run / "tensorboard").iterdir())]:
        while content:  # Source: the TFRecord format.
            length = int.from_bytes(content[:8], "little")
            event, content = event_pb2.Event.FromString(content[12 : 12 + length]), content[16 + length :]
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
    assert scalars_of(run.path) == {("loss", step): step / 2 for step in range(5)}


def test_a_tensorboard_file_that_cannot_grow_raises_an_error_at_every_step(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("app.tracking.tensorboard", reason="pip install -e '.[tensorboard]'")
    with closing(tensorboard.TensorBoardWriter(tmp_path, next_step=0)) as writer:
        (file,) = tmp_path.iterdir()
        with limited_file_size(file.stat().st_size):
            for step in range(20):
                with pytest.raises(OSError, match="File too large"):
                    writer.add_scalars({"loss": 1.0}, step)


@pytest.mark.slow
def test_wandb_offline_needs_no_key_and_writes_no_secret(config: Path) -> None:
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


def test_wandb_is_not_imported_unless_enabled_and_gets_only_listed_sections(run, monkeypatch):
    assert set(Settings.model_fields) - set(WANDB_SECTIONS) == {"logging", "mesh", "plugins", "watchdog"}
    monkeypatch.setitem(sys.modules, "wandb", None)  # importing it would fail
    for overrides in ([], ["logging.wandb_project=tests", "logging.wandb_mode=disabled"]):
        run_log = RunLog(run, load(None, overrides, {}), last_step=None, wandb_id=None)
        run_log.close()
        assert run_log.wandb_id is None


def test_profiled_steps_have_a_trace_and_unchanged_metrics(config: Path, finished: Path) -> None:
    succeeded(train_here(config, "logging.profile_steps=[2]", "run.steps=2", "eval.every_steps=0"))
    run = config.parent / "runs" / "tiny"
    assert {path.name for path in (run / "profile").iterdir()} == {"step_000002"}
    assert len(list((run / "profile").rglob("*.xplane.pb"))) == 1
    of_finished = [
        {name: value for name, value in line.items() if not name.startswith("eval/")} for line in metrics_of(finished)
    ]
    assert reproducible(metrics_of(run)) == reproducible(of_finished[1:3])
    (trace,) = (run / "profile" / "step_000002").rglob("*.trace.json.gz")
    events = {event.get("name"): event for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"rollout", "reward", "score", "advantage", "update"} <= events.keys()
    assert events["step"]["args"]["step_num"] == "2"
    # Names of Python functions begin with $.
    assert not any((name or "").startswith("$") for name in events)


def test_a_profile_already_running_elsewhere_is_not_disturbed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    traces = StepProfiler([1, 2], lambda step: tmp_path / str(step))
    with jax.profiler.trace(tmp_path / "theirs"), caplog.at_level(logging.WARNING):
        for step in (1, 2):
            traces.start(step)
            traces.stop()
    (warning,) = [record.message for record in caplog.records if record.name == "app.tracking.timer"]
    assert "Only one profile may be run at a time" in warning
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
