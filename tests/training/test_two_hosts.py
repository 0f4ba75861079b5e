"""Two processes of four devices each train as one process of eight."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from app.jsonl import read_jsonl
from tests.training.program import (
    DEADLINE_S,
    metrics_of,
    reproducible,
    settings,
    started,
    train_here,
    wait_for_step,
)

CREDIT = ("algorithm.estimator=reinforce_plus_plus", "algorithm.kl_in=reward", "algorithm.kl_target=0.1")
"""Whitening and an adapted penalty are agreed on by all hosts."""
OF_THE_CUT = ("batching/", "global_seqlen/", "score/")
"""Each host packs its own samples, so rows and their number differ from one host's."""


@contextmanager
def two_hosts(config: Path, *overrides: str, resume: str = "never") -> Iterator[list[subprocess.Popen[str]]]:
    address = free_address()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    *("train", "--config", config, "--resume", resume),
                    *settings(*of_host(process_id, address), *overrides),
                )
            )
            for process_id in (0, 1)
        ]


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def of_host(process_id: int, address: str) -> tuple[str, ...]:
    """Settings of one of two processes with four devices each."""
    return (
        "mesh.cpu_devices=4",
        f"mesh.coordinator_address={address}",
        "mesh.num_processes=2",
        f"mesh.process_id={process_id}",
    )


def test_two_hosts_train_as_one(full_config: Path) -> None:
    run = full_config.parent / "runs" / "full"
    # One mini-batch: which prompts share one depends on the host that samples them.
    both = ("run.steps=2", "eval.every_steps=2", "algorithm.mini_batch_prompts=null", *CREDIT)
    # A clock that is always due: process 0's, and both save.
    clock = "checkpoint.every_minutes=1e-9"
    with two_hosts(full_config, *both, clock, "rollout.prompts_per_step=2", "logging.report=true") as hosts:
        (_, stderr), (stdout_of_second, stderr_of_second) = (host.communicate(timeout=DEADLINE_S) for host in hosts)
    assert [host.returncode for host in hosts] == [0, 0], stderr + stderr_of_second
    # Only the first process speaks; gloo, below JAX, greets on stdout.
    assert "step     2" in stderr
    assert "step" not in stderr_of_second and "report" not in stderr_of_second
    assert "everything is in" not in stdout_of_second
    assert {path.name for path in run.iterdir()} == {
        *(".lock", "settings.yaml", "metrics.jsonl", "sessions.jsonl", "rollouts", "checkpoints", "eval"),
        *("report.html", "rollouts.html", "plots"),
    }
    # Of the sixteen evaluation prompts the first process saved its half.
    assert "95 % interval (16 answers)" in (run / "report.html").read_text()
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"1", "2", "best"}
    assert os.readlink(run / "checkpoints" / "best") == "2"
    assert "process_id: 0  # set" in (run / "settings.yaml").read_text()
    assert train_here(full_config, *both, "run.name=one").exit_code == 0
    assert_close(run, run.parent / "one")


def assert_close(run: Path, other: Path) -> None:
    for line, expected in zip(reproducible(metrics_of(run)), reproducible(metrics_of(other)), strict=True):
        assert line.keys() == expected.keys()
        for name in (name for name in line if not name.startswith(OF_THE_CUT)):
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    # The first host's share of the samples is the first half of them.
    samples = [record["completion_token_ids"] for _, record in read_jsonl(run / "rollouts" / "step_000002.jsonl")]
    expected = [record["completion_token_ids"] for _, record in read_jsonl(other / "rollouts" / "step_000002.jsonl")]
    assert len(samples) == 8
    assert samples == expected[:8]


def test_what_stops_one_host_stops_both_with_a_checkpoint_that_both_resume(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    half = ("rollout.prompts_per_step=2", "eval.every_steps=0", "checkpoint.every_steps=100000")
    with two_hosts(config, *half, "run.steps=100000") as hosts:
        wait_for_step(hosts[0], run, 2)
        os.kill(hosts[1].pid, signal.SIGTERM)
        output = [host.communicate(timeout=DEADLINE_S) for host in hosts]
    assert [host.returncode for host in hosts] == [75, 75], output
    last = metrics_of(run)[-1]["step"]
    assert (run / "checkpoints" / str(last)).is_dir()
    with two_hosts(config, *half, "run.steps=100000", resume="must") as hosts:
        wait_for_step(hosts[0], run, last + 1)
        os.kill(hosts[1].pid, signal.SIGINT)
        output = [host.communicate(timeout=DEADLINE_S) for host in hosts]
    assert [host.returncode for host in hosts] == [130, 130], output
    assert f"continuing after step {last} of 100000" in output[0][1]
    steps = [line["step"] for line in metrics_of(run)]
    assert steps == list(range(1, len(steps) + 1))
