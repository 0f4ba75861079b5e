"""Two processes of four devices each train as one process of eight."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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

PPO = ("algorithm.name=ppo", "algorithm.kl_target=0.1", "algorithm.filter=zero_variance", "algorithm.max_rounds=3")
"""A critic; whitening, an adapted penalty and rounds of sampling, on all of which hosts agree."""
# One mini-batch: which prompts share one depends on the host that gets them. A quota of few shapes to compile.
CUT = ("algorithm.mini_batch_prompts=null", "algorithm.max_tokens_per_device=512")
# A clock that is always due: process 0's, and both save.
BOTH = (*PPO, *CUT, "eval.every_steps=2", "checkpoint.every_minutes=1e-9")
OF_THE_CUT = ("batching/", "global_seqlen/", "score/", "value/batching/")
"""Each host packs its own samples, so rows and their number differ from one host's."""


@contextmanager
def two_hosts(config: Path, *overrides: str) -> Iterator[list[subprocess.Popen[str]]]:
    address = free_address()
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    *("train", "--config", config),
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


def test_two_hosts_train_as_one_would_and_what_stops_one_stops_both_with_a_checkpoint(full_config: Path) -> None:
    two, one = (full_config.parent / "runs" / name for name in ("two", "one"))
    assert train_here(full_config, *BOTH, "run.name=one", "run.steps=2").exit_code == 0
    endless = ("run.name=two", "rollout.prompts_per_step=2", "run.steps=100000", "logging.report=true")
    with two_hosts(full_config, *BOTH, *endless) as hosts:
        wait_for_step(hosts[0], two, 2)
        os.kill(hosts[1].pid, signal.SIGTERM)
        (_, stderr), (stdout_of_second, stderr_of_second) = (host.communicate(timeout=DEADLINE_S) for host in hosts)
    assert [host.returncode for host in hosts] == [75, 75], stderr + stderr_of_second
    # Only the first process speaks; gloo, below JAX, greets on stdout.
    assert "evaluation at step 0" in stderr and "step     2  reward" in stderr
    assert "reward" not in stderr_of_second and "report" not in stderr_of_second
    assert "everything is in" not in stdout_of_second
    assert_complete(two)
    for step in (1, 2):
        assert_close(two, one, step=step)
    last = metrics_of(two)[-1]["step"]
    # What both have saved, another number of hosts goes on from.
    result = train_here(full_config, *BOTH, "run.name=two", f"run.steps={last + 1}", resume="must")
    assert result.exit_code == 0, result.stderr
    assert f"continuing after step {last} of {last + 1}" in result.stderr
    assert [line["step"] for line in metrics_of(two)] == list(range(last + 2))


def assert_complete(run: Path) -> None:
    last = metrics_of(run)[-1]["step"]
    assert {path.name for path in run.iterdir()} == {
        *(".lock", "settings.yaml", "metrics.jsonl", "sessions.jsonl", "rollouts", "checkpoints", "eval"),
        *("report.html", "rollouts.html", "plots"),
    }
    # Of the sixteen evaluation prompts the first process saved its half.
    assert "95 % interval (16 answers)" in (run / "report.html").read_text()
    saved = {path.name for path in (run / "checkpoints").iterdir()}
    assert saved >= {str(last - 1), str(last), "best"}
    assert os.readlink(run / "checkpoints" / "best") in saved
    assert "process_id: 0  # set" in (run / "settings.yaml").read_text()


def assert_close(run: Path, other: Path, *, step: int) -> None:
    line, expected = (reproducible(metrics_of(one))[step] for one in (run, other))
    assert line.keys() == expected.keys()
    for name in (name for name in line if not name.startswith(OF_THE_CUT)):
        assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    # Groups were left out, so one host has some that the other has sampled.
    assert line["rollout/num_rounds"] > 1
    # The first host's share of the samples is the first half of them.
    samples, expected = (uids_and_tokens(one, step) for one in (run, other))
    assert len(samples) == 8
    assert samples == expected[:8]


def uids_and_tokens(run: Path, step: int) -> list[tuple[Any, ...]]:
    records = (record for _, record in read_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl"))
    return [(r["uid"], r["group_id"], r["completion_token_ids"], r.get("loss_mask")) for r in records]
