"""Tests of `rollout.ray` in the commands: equal samples, and no process left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preflight.test_dry_run import foreseen
from tests.program import (
    DEADLINE_S,
    here,
    of_tiny,
    settings,
    started,
    train_here,
    wait_until,
)
from tests.training.test_slot_engine import SCHEDULED, texts

ACTORS = (*SCHEDULED, "rollout.ray.address=local")
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install -e '.[ray]'"
)


def rollout_of(model: Path, out: Path, *more: str) -> list[str | Path]:
    return ["rollout", *of_tiny(model), *settings(*ACTORS, *more), "--limit", "6", "--out", out]


def living(folder: Path) -> list[int]:
    """Returns the processes that use this folder for Ray's files, whatever their parent is."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"RAY_TMPDIR={folder}\0".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
    return found


def assert_all_end(processes: list[int]) -> None:
    end = time.monotonic() + DEADLINE_S
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            opened = os.pidfd_open(process)
            ended, _, _ = select.select([opened], [], [], max(end - time.monotonic(), 0))
            os.close(opened)
            assert ended, f"process {process} does not end"


@pytest.mark.slow
@needs_ray
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_actors_write_the_same_samples_and_outlive_nobody(
    sampled: Path, tiny_model: Path, tmp_path: Path, short_folder: Path
) -> None:
    """One command is killed, and the next one keeps its finished samples; neither leaves an actor behind."""
    out, part = tmp_path / "samples.jsonl", tmp_path / "samples.jsonl.part"
    command = rollout_of(tiny_model, out, "rollout.mode=exact", "rollout.segment.min=1", "rollout.segment.max=1")
    with started(*command, environ={"RAY_TMPDIR": str(short_folder)}) as process:
        wait_until(process, lambda: part.exists() and part.read_bytes().count(b"\n") > 1)
        others = [one for one in living(short_folder) if one != process.pid]
        process.kill()
        process.wait(timeout=DEADLINE_S)
    assert len(others) > 3
    assert_all_end(others)
    with started(*command, environ={"RAY_TMPDIR": str(short_folder)}) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0 and "continuing: " in stderr, stderr
    assert texts(out) == texts(sampled)
    assert "scheduler" in stdout and "ray" not in stdout.lower()
    assert living(short_folder) == []


def ray_is_on() -> bool:
    import ray

    return ray.is_initialized()


def test_ray_that_is_not_installed_is_named(
    config: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    for result in (train_here(config, *ACTORS), here(*rollout_of(tiny_model, tmp_path / "samples.jsonl"))):
        assert result.exit_code == 2 and "pip install -e '.[ray]'" in result.stderr
    assert not (config.parent / "runs").exists()


def test_who_only_scores_needs_no_ray(
    sampled: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    files = ("--input", sampled, "--out", tmp_path / "scored.jsonl")
    result = here("score", *of_tiny(tiny_model), *settings(*ACTORS), *files)
    assert result.exit_code == 0, result.stderr


def test_a_dry_run_starts_no_actors_and_sees_no_caches_of_theirs(config: Path) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    memory = foreseen(config, *ACTORS).memory
    assert memory["rollout"].get("kv_cache", 0) == 0 < foreseen(config, *SCHEDULED).memory["rollout"]["kv_cache"]
    assert not ray_is_on()


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path, because the paths of Ray's sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield Path(folder)
