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
# One mini-batch: which prompts share one depends on the host that samples them. A quota of few shapes to compile.
CUT = ("algorithm.mini_batch_prompts=null", "algorithm.max_tokens_per_device=512", "model.remat=none")
BOTH = (*PPO, *CUT)
EVALUATED = "eval.every_steps=2"
HALF = ("run.steps=100000", "rollout.prompts_per_step=2", "checkpoint.every_minutes=1e-9")
"""A clock that is always due: process 0's, and both save."""
OF_THE_CUT = ("batching/", "global_seqlen/", "score/", "value/batching/")
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


def test_two_hosts_train_as_one_and_what_stops_one_stops_both_with_a_checkpoint_that_both_resume(
    full_config: Path,
) -> None:
    run = full_config.parent / "runs" / "full"
    with two_hosts(full_config, *BOTH, *HALF, EVALUATED, "logging.report=true") as hosts:
        wait_for_step(hosts[0], run, 2)
        os.kill(hosts[1].pid, signal.SIGTERM)
        (_, stderr), (stdout_of_second, stderr_of_second) = (host.communicate(timeout=DEADLINE_S) for host in hosts)
    assert [host.returncode for host in hosts] == [75, 75], stderr + stderr_of_second
    # Only the first process speaks; gloo, below JAX, greets on stdout.
    assert "step     2  reward" in stderr
    assert "reward" not in stderr_of_second and "report" not in stderr_of_second
    assert "everything is in" not in stdout_of_second
    assert_complete(run)
    last = metrics_of(run)[-1]["step"]
    with two_hosts(full_config, *BOTH, *HALF, "eval.every_steps=100", resume="must") as hosts:
        wait_for_step(hosts[0], run, last + 1)
        os.kill(hosts[1].pid, signal.SIGINT)
        output = [host.communicate(timeout=DEADLINE_S) for host in hosts]
    assert [host.returncode for host in hosts] == [130, 130], output
    assert f"continuing after step {last} of 100000" in output[0][1]
    assert [line["step"] for line in metrics_of(run)] == list(range(metrics_of(run)[-1]["step"] + 1))
    assert train_here(full_config, *BOTH, EVALUATED, "run.name=one", "run.steps=2").exit_code == 0
    assert_close(run, run.parent / "one")


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


def assert_close(run: Path, other: Path) -> None:
    """In the first two steps: later ones magnify how differently the hosts' sums were rounded."""
    lines, expected_lines = (reproducible(metrics_of(one))[:3] for one in (run, other))
    for line, expected in zip(lines, expected_lines, strict=True):
        assert line.keys() == expected.keys()
        for name in (name for name in line if not name.startswith(OF_THE_CUT)):
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-5), name
    # Groups were left out, and from one host others came to fill the other's part.
    assert max(line["rollout/num_rounds"] for line in lines[1:]) > 1
    for step in (1, 2):
        # The first host's share of the samples is the first half of them.
        samples, expected = (uids_and_tokens(one, step) for one in (run, other))
        assert len(samples) == 8
        assert samples == expected[:8]


def uids_and_tokens(run: Path, step: int) -> list[tuple[Any, ...]]:
    records = (record for _, record in read_jsonl(run / "rollouts" / f"step_{step:06d}.jsonl"))
    return [(r["uid"], r["group_id"], r["completion_token_ids"], r.get("loss_mask")) for r in records]
