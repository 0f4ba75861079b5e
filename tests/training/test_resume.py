"""Tests of runs that go on from their checkpoints, and of changes that a resumed run refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from app.records.jsonl import read_jsonl
from app.records.run_directory import RunDirectory
from app.records.settings_history import SettingsHistory
from tests.program import digest_of, here, metrics_of, progress_of, reproducible, saved_state, train_here
from tests.tiny_directory import write_model, write_tokenizer


@pytest.fixture
def stopped(uninterrupted: Path, tmp_path: Path, full_config: Path) -> Path:
    """The same run after step 6, with what a killed process leaves."""
    run = tmp_path / "runs" / "full"
    shutil.copytree(uninterrupted, run)
    for step in (9, 12):
        shutil.rmtree(run / "checkpoints" / str(step))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:9]) + lines[9][:40])
    return run


def test_resumed_run_has_the_same_bits_wherever_its_arrays_wait(
    stopped: Path, full_config: Path, uninterrupted: Path
) -> None:
    """The moments and the reference move to host memory."""
    offloaded = ("optimizer.offload=true", "score.reference.offload=true")
    result = train_here(full_config, *offloaded, "run.steps=9", resume="auto")
    assert result.exit_code == 0, result.stderr
    assert "continuing after step 6 of 9" in result.stderr
    assert "changed: optimizer.offload was False and is now True\n" in result.stderr
    state, expected = saved_state(stopped, 9), saved_state(uninterrupted, 9)
    assert state.keys() == expected.keys() and len(state) > 30
    for name in expected:
        np.testing.assert_array_equal(state[name], expected[name], err_msg=name)
    assert progress_of(stopped, 9) == progress_of(uninterrupted, 9)
    assert reproducible(metrics_of(stopped)) == reproducible(metrics_of(uninterrupted))[:10]


def test_finished_run_has_no_step_left_and_a_failing_report_costs_a_warning(
    finished: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = config.parent / "runs" / "tiny"
    shutil.copytree(finished, run)
    (run / "report.html").write_text("old")
    result = train_here(config, "logging.report=true", resume="must")
    assert result.exit_code == 0
    assert "continuing after step 4 of 4\nno step is left; --set run.steps=8 continues the training\n" in result.stderr
    assert metrics_of(run) == metrics_of(finished)
    assert "step 4 of 4" in (run / "report.html").read_text()
    assert [record["after_step"] for _, record in read_jsonl(run / "sessions.jsonl")] == [0, 4]
    shutil.rmtree(run / "plots")
    (run / "plots").write_text("in the way")
    result = train_here(config, "logging.report=true", resume="must")
    assert result.exit_code == 0
    assert "the report could not be written (InputError" in caplog.text
    assert f"try again with `grpo report {run}`" in caplog.text
    assert result.stdout.splitlines()[-1] == f"everything is in {run}"


def test_more_steps_change_a_learning_rate_that_decays(finished: Path, config: Path) -> None:
    shutil.copytree(finished, config.parent / "runs" / "tiny")
    linear = ("run.steps=5", "optimizer.schedule=linear")
    result = train_here(config, *linear, resume="must", allow_changed=["optimizer.schedule"])
    assert result.exit_code == 0, result.stderr
    assert (
        "changed: run.steps was 4 and is now 5; this changes the learning rate of the remaining steps, because the "
        "linear schedule ends at the last one\n"
    ) in result.stderr and "no step is left" not in result.stderr


def test_other_data_or_tokenizer_is_refused(stopped: Path, full_config: Path, tmp_path: Path) -> None:
    before = digest_of(stopped)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 40)
    changed = write_model(tmp_path / "changed")
    write_tokenizer(changed, chat_template="{{ messages[-1].content }}<|assistant|>")
    for name, overrides in (
        ("data", (f"data.source={other}", f"data.eval_source={other}")),
        ("tokenizer", (f"model.path={changed}",)),
    ):
        result = train_here(full_config, *overrides, resume="auto")
        assert result.exit_code == 2
        assert f"error: --resume: {name} changed since this run was started" in result.stderr
        assert digest_of(stopped) == before


def test_decisive_change_is_refused_unless_it_is_allowed(stopped: Path, full_config: Path) -> None:
    other = ("algorithm.name=dapo", "run.seed=5", "logging.save_rollouts=false", "optimizer.first_moment=bfloat16")
    metadata = stopped / "checkpoints" / "6" / "progress" / "metadata"
    # A checkpoint that is damaged stays where it is, too.
    whole = metadata.read_text()
    metadata.write_text("{}")
    before = digest_of(stopped)
    result = train_here(full_config, *other, resume="auto", allow_changed=["run.seed", "optimizer"])
    assert result.exit_code == 2
    assert "\n  algorithm.name was 'grpo' and is now 'dapo'\nSet them as before" in result.stderr
    assert result.stderr.rstrip().endswith("accept the new values with --allow-changed algorithm.name")
    assert "did you mean algorithm?" in train_here(full_config, resume="auto", allow_changed=["algoritm"]).stderr
    assert "--allow-changed needs --resume" in train_here(full_config, allow_changed=["algorithm"]).stderr
    assert digest_of(stopped) == before
    metadata.write_text(whole)

    allowed = ["run.seed", "algorithm.name", "optimizer.first_moment"]
    result = train_here(full_config, *other, "run.steps=7", resume="auto", allow_changed=allowed)
    assert result.exit_code == 0, result.stderr
    for change in ("run.seed was 0", "algorithm.clip_high was 0.2", "run.steps was 12", "logging.save_rollouts was"):
        assert f"changed: {change}" in result.stderr
    assert {array.dtype.name for name, array in saved_state(stopped, 7).items() if "mu" in name} == {"bfloat16"}
    first, second = SettingsHistory.read(RunDirectory(stopped)).periods
    assert (first.first_step, second.first_step) == (1, 7)
    assert (first.settings["algorithm.name"][0], second.settings["algorithm.name"][0]) == ("grpo", "dapo")
    assert here("report", stopped).exit_code == 0
    assert "Changed by a resume" in (stopped / "report.html").read_text()
    for checkpoint, text in ((stopped, "after 7 steps of grpo and dapo"), (stopped / "checkpoints" / "6", "of grpo\n")):
        exported = stopped.parent / f"exported-{checkpoint.name}"
        assert here("export", "--checkpoint", checkpoint, "--out", exported).exit_code == 0
        assert text in (exported / "README.md").read_text()


def test_lost_metrics_and_settings_are_named(stopped: Path, full_config: Path) -> None:
    (stopped / "metrics.jsonl").unlink()
    sessions = stopped / "sessions.jsonl"
    sessions.write_bytes(sessions.read_bytes().replace(b"after_step", b"before_step") + sessions.read_bytes())
    result = train_here(full_config, "run.steps=7", "logging.report=true", resume="auto")
    assert result.exit_code == 0, result.stderr
    assert "metrics.jsonl has no line for steps 1-6." in (stopped / "report.html").read_text()
    assert result.stderr.count("warning: sessions.jsonl has no valid settings in line 1; others are taken") == 1
