"""Tests of runs that end before their last step because evaluations no longer improve."""

from __future__ import annotations

from pathlib import Path

from tests.program import assert_same_run, digest_of, here, metrics_of, newest_checkpoint, train_here

NEVER_BETTER = ("run.early_stopping.patience=1", "checkpoint.best_metric=eval/error_count")
REASON = "eval/error_count has not improved in 1 evaluations (run.early_stopping.patience); its best value is "


def test_a_run_that_has_ended_early_is_complete_and_goes_on_only_under_other_settings(
    config: Path, finished: Path
) -> None:
    run = config.parent / "runs" / "tiny"
    result = train_here(config, *NEVER_BETTER, "checkpoint.every_steps=100", "logging.report=true")
    assert result.exit_code == 0, result.stderr
    assert f"ended early, after step 2 of 4: {REASON}" in result.stderr
    assert f"\nended early: {REASON}" in result.stdout
    assert f"step 2 of 4, ended early: {REASON}" in (run / "report.html").read_text()
    assert [line["step"] for line in metrics_of(run)] == [0, 1, 2] and newest_checkpoint(run) == 2
    before = {name: digest for name, digest in digest_of(run).items() if "rollouts/" in name}
    again = train_here(config, *NEVER_BETTER, resume="must")
    assert again.exit_code == 0, again.stderr
    assert f"ended early, after step 2 of 4: {REASON}" in again.stderr
    assert len(metrics_of(run)) == 3 and before.items() <= digest_of(run).items()
    on = train_here(config, "logging.report=true", resume="must")
    assert on.exit_code == 0, on.stderr
    assert "ended early" not in on.stdout + on.stderr + (run / "report.html").read_text()
    assert_same_run(run, finished, step=4)


def test_the_last_step_is_not_early(config: Path) -> None:
    result = train_here(config, *NEVER_BETTER, "run.steps=2", "logging.report=true")
    assert result.exit_code == 0 and "ended early" not in result.stdout + result.stderr
    report = here("report", config.parent / "runs" / "tiny")
    assert report.exit_code == 0
    assert "ended early" not in (config.parent / "runs" / "tiny" / "report.html").read_text()
