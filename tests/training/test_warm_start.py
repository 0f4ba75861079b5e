"""Tests runs that start from the policy of another run."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.program import (
    assert_same_run,
    copy_until,
    digest_of,
    here,
    metrics_of,
    records_of,
    saved_state,
    settings,
    succeeded,
)
from tests.replays import assert_refused
from tests.tiny_directory import write_model

PENALTY = ("algorithm.beta=0.1", "checkpoint.every_steps=1", "checkpoint.keep=9", "run.steps=3")


def warm(start: Path, config: Path, *overrides: str, resume: str = "never"):
    chosen = settings("run.name=warm", *overrides)
    return here("train", "--config", config, "--checkpoint", start, "--resume", resume, *chosen)


def test_a_run_starts_from_the_policy_of_a_checkpoint_with_fresh_moments(finished: Path, config: Path) -> None:
    start = finished / "checkpoints" / "4"
    result = succeeded(warm(start, config, "run.steps=1", "optimizer.learning_rate=1e-30"))
    assert f"starts from the policy of {start}" in result.stderr
    run = config.parent / "runs" / "warm"
    state, before = saved_state(run, 1), saved_state(finished, 4)
    assert state.keys() == before.keys()
    trained = [name for name in state if "params" in name]
    for name in trained:
        np.testing.assert_array_equal(state[name], before[name], err_msg=name)
    assert max(int(value) for name, value in state.items() if "num_updates" in name) == 1
    first, last = metrics_of(run)[0], metrics_of(finished)[-1]
    evaluated = [name for name in last if name.startswith("eval/")]
    assert {name: first[name] for name in evaluated} == {name: last[name] for name in evaluated}
    assert records_of(run / "sessions.jsonl")[0]["checkpoint"] == str(start)
    assert [line["step"] for line in metrics_of(run)] == [0, 1]


def test_a_resumed_run_keeps_its_starting_policy_as_the_reference(finished: Path, config: Path, tmp_path: Path) -> None:
    start = finished / "checkpoints" / "4"
    succeeded(warm(start, config, *PENALTY))
    run = config.parent / "runs" / "warm"
    assert metrics_of(run)[1]["policy/kl"] == pytest.approx(0, abs=1e-6)
    whole = Path(shutil.move(run, tmp_path / "whole"))
    copy_until(whole, run, step=1)
    before = digest_of(run)
    alone = here("train", "--config", config, "--resume", "auto", *settings("run.name=warm", *PENALTY))
    assert alone.exit_code == 2
    assert "--resume: the checkpoint of --checkpoint changed since this run was started" in alone.stderr
    other = warm(finished / "checkpoints" / "2", config, *PENALTY, resume="auto")
    assert other.exit_code == 2 and "the checkpoint of --checkpoint changed" in other.stderr
    assert digest_of(run) == before
    succeeded(warm(start, config, *PENALTY, resume="auto"))
    assert_same_run(run, whole, step=3)


def test_a_warm_start_without_a_config_uses_the_settings_of_its_run(finished: Path, tmp_path: Path) -> None:
    options = settings(f"run.dir={tmp_path}", "logging.report=false", "run.steps=1")
    succeeded(here("train", "--checkpoint", finished, *options))
    (run,) = tmp_path.iterdir()
    assert run.name == f"{finished.name}-warm-start"
    report = here("train", "--checkpoint", finished, "--dry-run", *options, "--set", "run.name=other")
    assert "starts from the policy of" in succeeded(report).stdout


def test_an_unusable_starting_checkpoint_is_refused(finished: Path, config: Path, tmp_path: Path) -> None:
    runs = config.parent / "runs"
    other = f"model.path={write_model(tmp_path / 'seed1', seed=1)}"
    assert_refused(warm(finished, config, other), r"--checkpoint: .* was trained from another model", runs)
    assert_refused(warm(tmp_path / "gone", config), r"--checkpoint: .*gone: no such file or folder", runs)
    own = here(
        *("train", "--config", config, "--checkpoint", finished, "--resume", "auto"),
        *settings(f"run.dir={finished.parent}", f"run.name={finished.name}", "run.steps=9"),
    )
    assert own.exit_code == 2 and "is the run of --checkpoint; choose another run.name" in own.stderr
