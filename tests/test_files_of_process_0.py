"""Tests commands on two hosts of which only the first has the run, the samples and the folder of the output."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.records.run_directory import RunDirectory
from app.tracking.bucket import Bucket
from app.tracking.run_mirror import RunMirror
from tests import program
from tests.program import here, records_of, settings, succeeded
from tests.tracking.buckets import bucket_server
from tests.two_hosts import HOSTS_PROGRAM, Ended, blind_host, run_on_two_hosts

pytestmark = pytest.mark.two_hosts

GRADED = ("uid", "group_id", "completion", "rewards")


@pytest.fixture
def only(finished: Path, tmp_path: Path) -> Path:
    """Returns a folder with a copy of a finished run, for only the first of two hosts."""
    shutil.copytree(finished, tmp_path / "only" / "tiny", symlinks=True)
    return tmp_path / "only"


def run_blind(only: Path, *arguments: str | Path, exit_code: int = 0, **how: Any) -> tuple[Ended, Ended]:
    hosts = run_on_two_hosts(*arguments, programs=(HOSTS_PROGRAM, blind_host(only)), **how)
    assert [host.exit_code for host in hosts] == [exit_code] * 2, hosts
    return hosts


def test_rollout_and_score_of_files_on_process_0_equal_those_of_one_host(only: Path, tmp_path: Path) -> None:
    (only / "prompts.jsonl").write_text(
        "".join(f'{{"prompt": "{a} + 30 = ?", "answer": "{a + 30}"}}\n' for a in range(7))
    )
    chosen = ("rollout", "--checkpoint", only / "tiny", "--prompts", only / "prompts.jsonl")
    workers = ("rollout.scheduler=adaptive", "rollout.workers.fast.slots=4", "rollout.workers.heavy.count=0")
    chosen = (*chosen, *settings(*workers, "rollout.mode=exact"))
    hosts = run_blind(only, *chosen, "--out", only / "prompts.jsonl", "--overwrite", exit_code=2)
    assert all(f"--prompts and --out both name {only / 'prompts.jsonl'}" in host.stderr for host in hosts)
    files = ("--out", only / "samples.jsonl", "--timeline", only / "slots.html")
    run_blind(only, *chosen, *settings("rollout.workers.fast.count=4", "rollout.prompts_per_step=2"), *files)
    assert not list(only.glob("*.part")) and len(list(only.glob("slots.host_*_of_2.html"))) == 2
    of_one = settings("rollout.workers.fast.count=8", "rollout.prompts_per_step=4")
    succeeded(here(*chosen, *of_one, "--out", tmp_path / "samples.jsonl"))
    found, expected = records_of(only / "samples.jsonl"), records_of(tmp_path / "samples.jsonl")
    for record in (*found, *expected):
        for name in ("elapsed_s", "worker", "segments"):
            del record[name]
    assert found == expected and len(found) == 28

    chosen = ("score", "--input", only / "samples.jsonl", "--checkpoint", only / "tiny" / "checkpoints" / "best")
    run_blind(only, *chosen, "--out", only / "scored-{step}.jsonl")
    succeeded(here(*chosen, "--out", tmp_path / "scored-{step}.jsonl"))
    (scored,) = only.glob("scored-*.jsonl")
    for record, other in zip(records_of(scored), records_of(tmp_path / scored.name), strict=True):
        np.testing.assert_allclose(record.pop("policy_logprobs"), other.pop("policy_logprobs"), rtol=1e-5, atol=1e-5)
        assert record == other


def test_evaluation_of_a_checkpoint_in_a_bucket_writes_only_on_process_0(only: Path, tmp_path: Path) -> None:
    # The hosts share the working directory, and with it the copy of the run.
    chosen, address = ("evaluate", "--json", "--checkpoint"), f"gs://bucket/place/{tmp_path.name}"
    with bucket_server("gs"):
        with RunMirror(RunDirectory(only / "tiny"), Bucket(address)) as mirror:
            mirror.start()
        first, second = run_blind(only, *chosen, address, "--out", only / "evaluated.jsonl", cwd=tmp_path)
    expected = json.loads(succeeded(here(*chosen, only / "tiny", "--out", tmp_path / "evaluated.jsonl")).stdout)
    assert json.loads(first.stdout[first.stdout.index("{") :])["metrics"] == expected["metrics"]
    assert "{" not in second.stdout
    found, expected = (records_of(folder / "evaluated.jsonl") for folder in (only, tmp_path))
    for record, other in zip(found, expected, strict=True):
        assert [record[name] for name in GRADED] == [other[name] for name in GRADED]
    hosts = run_blind(only, *chosen, only / "tiny", "--out", only / "evaluated.jsonl", exit_code=2)
    assert all(f"--out: {only / 'evaluated.jsonl'} exists already" in host.stderr for host in hosts)
    hosts = run_blind(only, *chosen, only, "--out", only / "other.jsonl", exit_code=2)
    assert all(f"--checkpoint: no settings.yaml of a run was found in {only}" in host.stderr for host in hosts)


def test_replay_of_a_run_on_process_0_equals_that_of_a_shared_run(only: Path, tmp_path: Path) -> None:
    steps = ("run.steps=3", "rollout.prompts_per_step=2", "logging.report=false", "checkpoint.every_steps=1")
    start = ("--from-rollouts", only / "tiny", "--checkpoint", only / "tiny" / "checkpoints" / "2")
    chosen = ("train", *start, *settings(*steps))
    run_blind(only, *chosen, *settings(f"run.dir={only}"))
    hosts = run_on_two_hosts(*chosen, *settings(f"run.dir={tmp_path}"))
    assert [host.exit_code for host in hosts] == [0, 0], hosts
    program.assert_same_run(only / "tiny-replay", tmp_path / "tiny-replay", step=3)
