"""Tests `rollout.workers`, on this host and as Ray actors."""

import contextlib
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.mesh import jax_startup
from app.preflight.dry_run import make_dry_run_report
from app.runtime.model_spec import read_model_spec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from settings import load
from tests.program import DEADLINE_S, here, of_tiny, records_of, settings, started, succeeded, train_here, wait_until
from tests.reward.processes import ended

SCHEDULED = ("rollout.scheduler=adaptive", "rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4")
ACTORS = (*SCHEDULED, "rollout.ray.address=local")


def opened(*overrides: str) -> Session:
    chosen = load(None, overrides, {}).settings
    jax_startup.initialize_distributed(chosen.mesh)
    return Session.open(ScoringSession.open(chosen, read_model_spec(chosen)))


@pytest.mark.parametrize(
    ("mode", "rows_together", "address"), [("exact", 8, "null"), ("fast", None, "null"), ("exact", 8, "local")]
)
def test_fast_workers_may_have_many_slots_for_short_rows(mode: str, rows_together: int | None, address: str) -> None:
    if address == "local":
        pytest.importorskip("ray")
    session = opened(
        *("data.max_prompt_length=16", "rollout.max_new_tokens=48", "model.dtype=float32", "mesh.shape='8,1,1'"),
        *("rollout.scheduler=pdsr_v2", f"rollout.mode={mode}", f"rollout.ray.address={address}"),
        *("rollout.workers.fast.slots=24", "rollout.workers.fast.max_length=32", "rollout.workers.heavy.slots=16"),
    )
    assert session.workers is not None
    fast, heavy = (worker.engine for worker in session.workers.workers)
    assert (fast.shapes.num_slots, fast.shapes.max_row_length) == (24, 32)
    assert (heavy.shapes.num_slots, heavy.shapes.max_row_length) == (16, 64)
    assert {engine.shapes.rows_together for engine in (fast, heavy)} == {rows_together}
    assert [engine.programs.table_width for engine in (fast, heavy)] == ([4, 4] if rows_together else [2, 4])
    assert session.workers.engine is heavy, "its cache is larger, although it has fewer slots"
    assert heavy.batch_shape.cache_length == 64 and fast.batch_shape.cache_length == 32


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


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Returns a folder with a short path, because the length of Ray's socket paths is limited."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_actors_write_the_same_samples_and_end_with_the_command(sampled, tiny_model, tmp_path, short_folder):
    """One command is killed, and the next one keeps its finished samples; neither leaves an actor behind."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
    out, part = tmp_path / "samples.jsonl", tmp_path / "samples.jsonl.part"
    command = rollout_of(tiny_model, out, "rollout.mode=exact", "rollout.segment.min=1", "rollout.segment.max=1")
    with started(*command, environ={"RAY_TMPDIR": str(short_folder)}) as process:
        wait_until(process, lambda: part.exists() and part.read_bytes().count(b"\n") > 1)
        process.send_signal(signal.SIGSTOP)  # It would finish while the processes are listed.
        others = [one for one in living(short_folder) if one != process.pid]
        process.kill()
        process.wait(timeout=DEADLINE_S)
    assert len(others) > 3
    assert all(map(ended, others))
    with started(*command, environ={"RAY_TMPDIR": str(short_folder)}) as process:
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0 and "continuing: " in stderr, stderr
    ours, expected = (
        [(r["group_id"], r["sample_index"], r["completion"]) for r in records_of(path)] for path in (out, sampled)
    )
    assert ours == expected
    assert "scheduler" in stdout and "ray" not in stdout.lower()
    assert all(map(ended, living(short_folder)))


def test_ray_is_needed_to_generate_but_not_to_score(config, sampled, tiny_model, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    for result in (train_here(config, *ACTORS), here(*rollout_of(tiny_model, tmp_path / "samples.jsonl"))):
        assert result.exit_code == 2 and "pip install -e '.[ray]'" in result.stderr
    assert not (config.parent / "runs").exists()
    files = ("--input", sampled, "--out", tmp_path / "scored.jsonl")
    succeeded(here("score", *of_tiny(tiny_model), *settings(*ACTORS), *files))


def test_a_dry_run_starts_no_ray_actors_and_omits_their_caches(config: Path) -> None:
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")

    def cache_bytes(*overrides: str) -> int:
        report = make_dry_run_report(load(str(config), overrides, {}), resume="never")
        assert report is not None
        return report.memory["rollout"].get("kv_cache", 0)

    assert cache_bytes(*ACTORS) == 0 < cache_bytes(*SCHEDULED)
    assert not ray.is_initialized()
