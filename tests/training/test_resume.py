"""Tests that runs continue from their checkpoints and that resumed runs refuse certain changes."""

import shutil
from pathlib import Path

import pytest

from app.records.run_directory import RunDirectory
from app.records.settings_history import SettingsHistory
from tests import program
from tests.tiny_directory import write_model, write_tokenizer


@pytest.fixture
def stopped(uninterrupted: Path, full_config: Path) -> Path:
    """Returns a copy of that run after step 6, with the files that a killed process leaves."""
    run = program.copy_until(uninterrupted, full_config.parent / "runs" / "full", step=6)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:9]) + lines[9][:40])
    return run


def test_a_resumed_run_is_bitwise_equal_with_and_without_offload(stopped, full_config, uninterrupted):
    """Offload moves the moments and the reference to host memory."""
    offloaded = ("optimizer.offload=true", "score.reference.offload=true")
    result = program.succeeded(program.train_here(full_config, *offloaded, "run.steps=9", resume="auto"))
    assert "continuing after step 6 of 9" in result.stderr
    assert "changed: optimizer.offload was False and is now True\n" in result.stderr
    program.assert_same_run(stopped, uninterrupted, step=9)


def test_a_finished_run_ends_before_anything_is_loaded(finished: Path, config: Path) -> None:
    run = Path(shutil.copytree(finished, program.run_of(config)))
    before = program.digest_of(run)
    result = program.succeeded(program.train_here(config, "model.path=gone", resume="must"))
    assert result.stderr == "note: no step is left after step 4; --set run.steps=8 continues the training\n"
    assert result.stdout.splitlines()[-1] == f"everything is in {run}"
    assert program.digest_of(run) == before


def test_a_failing_report_only_causes_a_warning(finished: Path, config: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Path(shutil.copytree(finished, program.run_of(config)))
    shutil.rmtree(run / "plots")
    (run / "plots").write_text("in the way")
    result = program.succeeded(program.train_here(config, "logging.report=true", "run.steps=5", resume="must"))
    assert [record["after_step"] for record in program.records_of(run / "sessions.jsonl")] == [0, 4]
    assert "the report could not be written (InputError" in caplog.text
    assert f"try again with `grpo report {run}`" in caplog.text
    assert result.stdout.splitlines()[-1] == f"everything is in {run}"


def test_resume_refuses_other_data_or_another_tokenizer(stopped: Path, full_config: Path, tmp_path: Path) -> None:
    before = program.digest_of(stopped)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "1 + 1 = ?", "answer": "2"}\n' * 40)
    changed = write_model(tmp_path / "changed")
    write_tokenizer(changed, chat_template="{{ messages[-1].content }}<|assistant|>")
    for name, overrides in (
        ("data", (f"data.source={other}", f"data.eval_source={other}")),
        ("tokenizer", (f"model.path={changed}",)),
    ):
        result = program.train_here(full_config, *overrides, resume="auto")
        assert result.exit_code == 2
        assert f"error: --resume: {name} changed since this run was started" in result.stderr
        assert program.digest_of(stopped) == before


OTHER = (
    *("algorithm.name=dapo", "run.seed=5", "logging.save_rollouts=false", "eval.every_steps=0"),
    *("optimizer.first_moment=bfloat16", "optimizer.schedule=linear", "checkpoint.best_metric=null"),
)
"""Settings that change the remaining steps of a run."""


def test_resume_refuses_decisive_changes_of_settings_unless_allowed(stopped: Path, full_config: Path) -> None:
    # A damaged checkpoint also stays where it is.
    (stopped / "checkpoints" / "6" / "progress" / "metadata").write_text("{}")
    before = program.digest_of(stopped)
    result = program.train_here(full_config, *OTHER, resume="auto", allow_changed=["run.seed", "optimizer"])
    assert result.exit_code == 2
    assert "\n  algorithm.name was 'grpo' and is now 'dapo'\nSet them as before" in result.stderr
    assert result.stderr.rstrip().endswith("accept the new values with --allow-changed algorithm.name")
    assert (
        "did you mean algorithm?" in program.train_here(full_config, resume="auto", allow_changed=["algoritm"]).stderr
    )
    assert "--allow-changed needs --resume" in program.train_here(full_config, allow_changed=["algorithm"]).stderr
    assert program.digest_of(stopped) == before


def test_resume_reports_allowed_changes_and_lost_metrics(stopped: Path, full_config: Path) -> None:
    (stopped / "metrics.jsonl").unlink()
    sessions = stopped / "sessions.jsonl"
    sessions.write_bytes(sessions.read_bytes().replace(b"after_step", b"before_step") + sessions.read_bytes())
    allowed = ["run.seed", "algorithm.name", "optimizer.first_moment", "optimizer.schedule", "model.eos_tokens"]
    chosen = (*OTHER, "run.steps=7", "logging.report=true", "model.eos_tokens=[7]")
    result = program.succeeded(program.train_here(full_config, *chosen, resume="auto", allow_changed=allowed))
    for change in ("run.seed was 0", "algorithm.clip_high was 0.2", "logging.save_rollouts was"):
        assert f"changed: {change}" in result.stderr
    assert (
        "changed: run.steps was 12 and is now 7; this changes the learning rate of the remaining steps, because the "
        "linear schedule ends at the last one\n"
    ) in result.stderr and "no step is left" not in result.stderr
    assert result.stderr.count("warning: sessions.jsonl has no valid settings in line 1; other lines are used") == 1
    assert {array.dtype.name for name, array in program.saved_state(stopped, 7).items() if "mu" in name} == {"bfloat16"}
    first, second = SettingsHistory.read(RunDirectory(stopped)).periods
    assert (first.first_step, second.first_step) == (1, 7)
    assert (first.settings["algorithm.name"][0], second.settings["algorithm.name"][0]) == ("grpo", "dapo")
    report = (stopped / "report.html").read_text()
    assert "Changed by a resume" in report and "metrics.jsonl has no line for steps 1-6." in report
    for checkpoint, text in ((stopped, "after 7 steps of grpo and dapo"), (stopped / "checkpoints" / "6", "of grpo\n")):
        exported = stopped.parent / f"exported-{checkpoint.name}"
        program.succeeded(program.here("export", "--checkpoint", checkpoint, "--out", exported))
        assert text in (exported / "README.md").read_text()
