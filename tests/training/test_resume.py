"""Tests that stopped, killed and damaged runs continue as uninterrupted ones."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from app.records.jsonl import read_jsonl
from app.records.run_directory import RunDirectory
from app.records.settings_history import SettingsHistory
from tests.program import (
    DEADLINE_S,
    assert_same_run,
    digest_of,
    here,
    metrics_of,
    started,
    train_here,
    wait_for_step,
)
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


def test_killed_in_the_middle_of_a_step_it_ends_as_if_it_had_not_been(full_config: Path, uninterrupted: Path) -> None:
    run = full_config.parent / "runs" / "full"
    with started("train", "--config", full_config) as process:
        wait_for_step(process, run, 7)  # the save at step 6 has waited for the one at step 3
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=DEADLINE_S) == -signal.SIGKILL
    assert 7 <= metrics_of(run)[-1]["step"] < 12
    assert (run / "checkpoints" / "best" / "state").is_dir()
    result = train_here(full_config, resume="auto")
    assert result.exit_code == 0, result.stderr
    assert "continuing after step" in result.stderr
    assert_same_run(run, uninterrupted, step=12)
    best = os.readlink(run / "checkpoints" / "best")
    assert best == os.readlink(uninterrupted / "checkpoints" / "best")
    assert (run / "checkpoints" / best).is_dir()


def test_a_finished_run_has_nothing_left_to_do(finished: Path, config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    shutil.copytree(finished, run)
    before = metrics_of(run)
    (run / "report.html").write_text("old")
    result = train_here(config, "logging.report=true", resume="must")
    assert result.exit_code == 0
    assert "continuing after step 4 of 4\nno step is left; --set run.steps=8 continues the training\n" in result.stderr
    assert metrics_of(run) == before
    assert "step 4 of 4" in (run / "report.html").read_text()
    assert [record["after_step"] for _, record in read_jsonl(run / "sessions.jsonl")] == [0, 4]


def test_more_steps_say_that_they_change_a_learning_rate_that_decays(finished: Path, config: Path) -> None:
    shutil.copytree(finished, config.parent / "runs" / "tiny")
    result = train_here(config, "run.steps=5", resume="must")
    assert result.exit_code == 0, result.stderr
    assert "changed: run.steps was 4 and is now 5\n" in result.stderr and "no step is left" not in result.stderr
    linear = ("run.steps=6", "optimizer.schedule=linear")
    result = train_here(config, *linear, resume="must", allow_changed=["optimizer.schedule"])
    assert result.exit_code == 0, result.stderr
    assert (
        "changed: run.steps was 5 and is now 6; this changes the learning rate of the remaining steps, because the "
        "linear schedule ends at the last one\n"
    ) in result.stderr


def test_a_report_that_fails_costs_a_warning_and_not_the_run(
    finished: Path, config: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = config.parent / "runs" / "tiny"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "plots")
    (run / "plots").write_text("in the way")
    result = train_here(config, "logging.report=true", resume="must")
    assert result.exit_code == 0
    assert "the report could not be written (InputError" in caplog.text
    assert f"try again with `grpo report {run}`" in caplog.text
    assert result.stdout.splitlines()[-1] == f"everything is in {run}"


def test_changed_data_is_refused(stopped: Path, full_config: Path, tmp_path: Path) -> None:
    before = digest_of(stopped)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 40)
    result = train_here(full_config, f"data.source={other}", f"data.eval_source={other}", resume="auto")
    assert result.exit_code == 2
    assert "error: --resume: data changed since this run was started" in result.stderr
    assert digest_of(stopped) == before


def test_what_changes_the_meaning_of_a_run_is_refused_unless_it_is_allowed(stopped: Path, full_config: Path) -> None:
    before = digest_of(stopped)
    other = ("algorithm.name=dapo", "run.seed=5", "logging.save_rollouts=false")
    result = train_here(full_config, *other, resume="auto", allow_changed=["run.seed"])
    assert result.exit_code == 2
    assert "\n  algorithm.name was 'grpo' and is now 'dapo'\nSet them as before" in result.stderr
    assert result.stderr.rstrip().endswith("accept the new values with --allow-changed algorithm.name")
    assert "did you mean algorithm?" in train_here(full_config, resume="auto", allow_changed=["algoritm"]).stderr
    assert "--allow-changed needs --resume" in train_here(full_config, allow_changed=["algorithm"]).stderr
    assert digest_of(stopped) == before

    allowed = ["run.seed", "algorithm.name"]
    result = train_here(full_config, *other, "run.steps=7", resume="auto", allow_changed=allowed)
    assert result.exit_code == 0, result.stderr
    for change in ("run.seed was 0", "algorithm.clip_high was 0.2", "run.steps was 12", "logging.save_rollouts was"):
        assert f"changed: {change}" in result.stderr
    first, second = SettingsHistory.read(RunDirectory(stopped)).periods
    assert (first.first_step, second.first_step) == (1, 7)
    assert (first.settings["algorithm.name"][0], second.settings["algorithm.name"][0]) == ("grpo", "dapo")
    assert train_here(full_config, *other, "run.steps=8", resume="auto").exit_code == 0
    assert here("report", stopped).exit_code == 0
    page = (stopped / "report.html").read_text()
    assert "Changed by a resume" in page
    exported = stopped.parent / "exported"
    assert here("export", "--checkpoint", stopped, "--out", exported).exit_code == 0
    card = (exported / "README.md").read_text()
    assert "after 8 steps of grpo and dapo" in card
    exported = stopped.parent / "earlier"
    assert here("export", "--checkpoint", stopped / "checkpoints" / "6", "--out", exported).exit_code == 0
    card = (exported / "README.md").read_text()
    assert "after 6 steps of grpo\n" in card


def test_a_run_whose_metrics_are_lost_goes_on_and_the_report_names_the_steps(stopped: Path, full_config: Path) -> None:
    (stopped / "metrics.jsonl").unlink()
    result = train_here(full_config, "run.steps=7", "logging.report=true", resume="auto")
    assert result.exit_code == 0, result.stderr
    assert "metrics.jsonl has no line for steps 1-6." in (stopped / "report.html").read_text()


def test_a_damaged_checkpoint_stays_where_it_is_if_the_resume_is_refused(stopped: Path, full_config: Path) -> None:
    (stopped / "checkpoints" / "6" / "progress" / "metadata").write_text("{}")
    before = digest_of(stopped)
    result = train_here(full_config, "run.seed=5", resume="auto")
    assert result.exit_code == 2 and "run.seed was 0" in result.stderr
    assert digest_of(stopped) == before


def test_lost_settings_of_an_earlier_session_are_told(stopped: Path, full_config: Path) -> None:
    path = stopped / "sessions.jsonl"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"after_step", b"before_step") + content)
    result = train_here(full_config, "run.steps=7", resume="auto")
    assert result.exit_code == 0
    assert result.stderr.count("warning: sessions.jsonl has no valid settings in line 1; others are taken") == 1


def test_a_changed_tokenizer_is_refused(stopped: Path, full_config: Path, tmp_path: Path) -> None:
    changed = write_model(tmp_path / "changed")
    write_tokenizer(changed, chat_template="{{ messages[-1].content }}<|assistant|>")
    before = digest_of(stopped)
    result = train_here(full_config, f"model.path={changed}", resume="auto")
    assert result.exit_code == 2
    assert "error: --resume: tokenizer changed since this run was started" in result.stderr
    assert digest_of(stopped) == before
