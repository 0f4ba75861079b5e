"""Runs replays and compares their files, for tests."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from typer.testing import Result

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.records.jsonl import read_jsonl, write_jsonl
from app.records.run_directory import RunDirectory
from app.records.sample import Sample
from app.records.sample_json import sample_from_record
from app.runtime.inputs import read_critic, read_policy
from app.runtime.pinned_revisions import pin_revisions
from app.training.replay import Replay, read_replay
from settings import load
from tests import program


def replay(rollouts: Path, folder: Path, *overrides: str, options: Sequence[str | Path] = ()) -> Result:
    chosen = program.settings(f"run.dir={folder}", "logging.report=false", *overrides)
    return program.here("train", "--from-rollouts", rollouts, *options, *chosen)


def replayed(rollouts: Path, folder: Path, *overrides: str, options: Sequence[str | Path] = ()) -> Path:
    program.succeeded(replay(rollouts, folder, *overrides, options=options))
    (run,) = folder.iterdir()
    return run


def step_file(run: Path, step: int) -> Path:
    return run / "rollouts" / f"step_{step:06d}.jsonl"


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    records = program.records_of(path)
    for record in records:
        change(record)
    write_jsonl(path, records)
    return path


def looked(source: Path, *overrides: str, at: Path | None = None, checkpoint: Path | None = None) -> Replay:
    """Reads the samples at a path under the settings of a run, without using devices."""
    chosen = load(str(source / "settings.yaml"), ["run.name=again", *overrides], {}).settings
    chosen = pin_revisions(chosen, RunDirectory(source))
    model = read_policy(chosen)
    start = None if checkpoint is None else PolicyCheckpoint.open(checkpoint)
    target = RunDirectory.from_settings(chosen.run)
    return read_replay(at or source, start, chosen, model, read_critic(chosen, model), target_run=target)


def train_on(path: Path, config: Path, *overrides: str, options: Sequence[str | Path] = ()) -> Result:
    return program.here(
        "train", "--config", config, "--from-rollouts", path, *options, *program.settings(*program.UNJUDGED, *overrides)
    )


def assert_refused(result: Result, message: str, runs: Path) -> None:
    assert result.exit_code == 2, result.stderr
    assert re.search(message, result.stderr), result.stderr
    assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
    assert not runs.exists()


def samples_of(run: Path, step: int) -> list[Sample]:
    path = run / "rollouts" / f"step_{step:06d}.jsonl"
    return [sample_from_record(record, where=f"{path}:{line}") for line, record in read_jsonl(path)]


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Returns the metrics that a replay reproduces; it does not know the size of the data set."""
    return [
        {k: v for k, v in line.items() if k != "data/epoch"} for line in program.reproducible(program.metrics_of(run))
    ]


def steps_of(run: Path) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in lines_of(run)}


def assert_same_steps(run: Path, other: Path, *, steps: Sequence[int]) -> None:
    """Asserts an equal final state, position and penalty, and equal metrics and files of all steps, bit for bit."""
    program.assert_same_state(run, other, step=steps[-1])
    # A replay from a checkpoint begins without an evaluation.
    unlike = {"fingerprints": None, "initial_evaluation": None}
    place, wanted = ({**program.progress_of(one, steps[-1]), **unlike} for one in (run, other))
    assert place == wanted
    for step in steps:
        assert steps_of(run)[step] == steps_of(other)[step], step
        assert step_file(run, step).read_bytes() == step_file(other, step).read_bytes(), step
