"""A scheduled `grpo rollout` that is killed goes on from its log, as if it had not been."""

from __future__ import annotations

import json
import os
import signal

from pathlib import Path

import pytest

from app.rollout.scheduling.event_log import EventLog, read_log
from app.rollout.scheduling.events import WorkerJoined, WorkerLost
from tests.training.program import DEADLINE_S, NUM_DEVICES, digest_of, here, records_of, settings, started, wait_until

WORKERS = ("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4")
EXACT = (
    f"mesh.cpu_devices={NUM_DEVICES}",
    *("data.max_prompt_length=16", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.top_k=20"),
    *("rollout.scheduler=adaptive", "rollout.mode=exact", *WORKERS, "rollout.segment.min=1", "rollout.segment.max=2"),
)
VARIES = ("worker", "segments", "elapsed_s")
"""Fields that tell of the way a sample took."""


def command(model: Path, out: Path, *overrides: str) -> list[str | Path]:
    return ["rollout", *settings(f"model.path={model}", *EXACT, *overrides), "--limit", "16", "--out", out]


def content(out: Path) -> list[dict]:
    return [{name: value for name, value in one.items() if name not in VARIES} for one in records_of(out)]


def num_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


def kill(model: Path, out: Path, *, after: int) -> Path:
    """Starts it and kills it once its log has so many lines. Returns the log."""
    log = out.with_name(f"{out.name}.log")
    with started(*command(model, out)) as process:
        wait_until(process, lambda: num_lines(log) >= after)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
    assert not out.exists()
    return log


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The output of a rollout that nobody killed, and its log as `events.jsonl` beside it. Not to be written to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = here(*command(tiny_model, folder / "samples.jsonl"), "--log", folder / "events.jsonl")
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in folder.iterdir()} == {"samples.jsonl", "events.jsonl"}
    return folder / "samples.jsonl"


def test_killed_twice_it_writes_the_same_samples(tiny_model: Path, undisturbed: Path, tmp_path: Path) -> None:
    out = tmp_path / "samples.jsonl"
    log = kill(tiny_model, out, after=30)
    first = read_log(log)
    kill(tiny_model, out, after=num_lines(log) + 30)
    second = read_log(log)
    assert second.records[: len(first.records)] == first.records
    result = here(*command(tiny_model, out), "--log", tmp_path / "events.jsonl")
    assert result.exit_code == 0, result.stderr
    assert f"going on from {log}: " in result.stderr and "sampled before" in result.stdout
    assert content(out) == content(undisturbed)
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "events.jsonl"}
    whole = read_log(tmp_path / "events.jsonl")
    print([ (r.event.at, type(r.event).__name__) for r in whole.records][:5], len(first.records), len(second.records), len(whole.records))
