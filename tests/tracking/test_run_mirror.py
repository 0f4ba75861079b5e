"""Tests of the copy of a run in a bucket: what arrives, who may write, and what a network that fails does to it."""

import itertools
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from app.records.run_directory import RunDirectory
from app.tracking import run_mirror
from app.tracking.run_mirror import Bucket, LeaseLostError, RunMirror, fetch_run
from settings.errors import InputError
from tests.program import assert_same_run, here, metrics_of, settings, succeeded, wait_for
from tests.tracking.buckets import Network, bucket_server, reached_at


@pytest.fixture(scope="module", params=["s3", "gs"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    with bucket_server(request.param) as url:
        yield request.param, url


@pytest.fixture
def address(server: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(run_mirror, "RENEW_S", 0.2)
    monkeypatch.setattr(run_mirror, "LEASE_S", 1.0)
    monkeypatch.setattr(run_mirror, "MAX_DELAY_S", 0.2)
    return f"{server[0]}://bucket/{tmp_path.name}"


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "run")
    save(made, 1)
    made.sessions_path.write_text("{}\n")
    (made.path / ".lock").touch()
    return made


def save(run: RunDirectory, step: int) -> None:
    """Writes a line and a checkpoint, which appears whole, and removes the oldest of three."""
    for name in ("progress/metadata", "state/d/0", "state/d/1"):
        path = run.checkpoints_dir / ".saving" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(f"{step} {name}").randbytes(50_000))
    path.parents[2].rename(run.checkpoints_dir / str(step))
    with run.metrics_path.open("a") as file:
        file.write(f'{{"step": {step}}}\n')
    for old in sorted(run.checkpoint_steps)[:-2]:
        shutil.rmtree(run.checkpoints_dir / str(old))


def checkpoints_of(run: RunDirectory) -> dict[str, bytes]:
    files = (path for path in run.checkpoints_dir.rglob("*") if path.is_file())
    return {str(path.relative_to(run.checkpoints_dir)): path.read_bytes() for path in files}


def test_a_copy_follows_the_run_and_is_fetched_once(run: RunDirectory, address: str, tmp_path: Path) -> None:
    bucket, elsewhere = Bucket(address), RunDirectory(tmp_path / "elsewhere")
    bucket.check()
    with RunMirror(run, bucket) as mirror:
        mirror.start()
        for step in (2, 3):
            save(run, step)
            mirror.request()
            wait_for(lambda step=step: f"checkpoints/{step}.complete" in bucket.sizes())
    assert {name for name in bucket.sizes() if "/" not in name} == {"metrics.jsonl", "sessions.jsonl"}
    assert fetch_run(bucket, elsewhere) == f"fetched from {address}: step 3"
    assert checkpoints_of(elsewhere) == checkpoints_of(run)
    assert metrics_of(elsewhere.path) == metrics_of(run.path) and elsewhere.has_settings
    assert fetch_run(bucket, elsewhere) == ""


def test_only_one_process_writes_a_run(run: RunDirectory, address: str) -> None:
    with RunMirror(run, Bucket(address)) as first:
        with pytest.raises(InputError, match="is being written by another process, on "):
            RunMirror(run, Bucket(address)).__enter__()
        # As one that started before the first had renewed its lease.
        Bucket(address).write(run_mirror.LEASE, b'{"owner": "another", "host": "vm-2"}')
        with pytest.raises(LeaseLostError, match="on vm-2, has begun to write"):
            wait_for(lambda: first.request())
    # Whoever held it is gone.
    with RunMirror(run, Bucket(address)):
        pass
    assert run_mirror.LEASE not in Bucket(address).sizes()


@pytest.mark.slow
def test_cut_connections_lose_nothing_and_no_half_is_taken_for_whole(run, server, address, tmp_path):
    network, steps = Network(server[1]), random.Random(0)
    with reached_at(server[0], network.url):
        near = Bucket(address)
        with RunMirror(run, near) as mirror:
            mirror.start()
            for step in itertools.count(2):
                if network.num_cuts > 5 and step > 8:
                    break
                network.fault_rate = steps.choice([0.05, 0.1, 0.2])
                save(run, step)
                mirror.request()
                time.sleep(steps.random())
                # As if the machine were gone now: what is there is whole, checkpoint by checkpoint.
                network.fault_rate = 1.0
                time.sleep(0.1)
                kept = RunDirectory(tmp_path / f"kept{step}")
                with reached_at(*server):
                    fetch_run(Bucket(address), kept)
                for found in kept.checkpoint_steps:
                    for path in (kept.checkpoints_dir / str(found) / "state" / "d").iterdir():
                        assert path.read_bytes() == random.Random(f"{found} state/d/{path.name}").randbytes(50_000)
            network.fault_rate = 0.0
    whole = RunDirectory(tmp_path / "whole")
    fetch_run(Bucket(address), whole)
    assert checkpoints_of(whole) == checkpoints_of(run)
    network.close()


def test_unusable_buckets_are_named(server: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=rf"run.dir: {server[0]}://nowhere/x cannot be .*; check that the bucket"):
        Bucket(f"{server[0]}://nowhere/x").check()

    def no_library(*_: object, **__: object) -> None:
        raise ImportError("Install it")

    monkeypatch.setattr(fsspec, "url_to_fs", no_library)
    with pytest.raises(InputError, match=r"s3://a/b cannot be opened \(Install it\); pip install 'grpo-jax\[s3\]'"):
        Bucket("s3://a/b")


@pytest.mark.slow
def test_run_goes_on_from_its_copy_on_an_empty_disk(
    config: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = ("run.steps=4", "checkpoint.every_steps=1", "eval.every_steps=0", "checkpoint.keep=9")
    whole = config.parent / "whole"
    succeeded(here("train", "--config", config, *settings(*chosen, f"run.dir={whole}", "run.name=x")))
    for place, steps, resume in (("one", 2, "never"), ("two", 4, "must")):
        (config.parent / place).mkdir()
        monkeypatch.chdir(config.parent / place)
        overrides = settings(*chosen, f"run.steps={steps}", f"run.dir={address}", "run.name=x")
        result = succeeded(here("train", "--config", config, "--resume", resume, *overrides))
    assert f"fetched from {address}/x: step 2" in result.stderr
    assert_same_run(Path("runs", *address.split("://"), "x").absolute(), whole / "x", step=4)
    again = here("train", "--config", config, *settings(*chosen, f"run.dir={address}", "run.name=x"))
    assert again.exit_code == 2 and f"{address}/x already holds a run" in again.stderr
