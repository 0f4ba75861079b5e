"""Tests of two processes of which one is stopped, dies, fails or is missing; the other must never wait forever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.free_address import free_address
from tests.program import DEADLINE_S, metrics_of, newest_checkpoint, settings, started, train_here, wait_for_step
from tests.two_hosts import HOSTS_PROGRAM, KEEPING, ended, hosts_program, of_host, run_on_two_hosts, two_hosts

pytestmark = pytest.mark.two_hosts

HEARTBEAT_S = 3
SMALL = ("run.steps=100000", "eval.every_steps=0", "checkpoint.best_metric=null", "rollout.prompts_per_step=2")
ON_ONE_HOST = ("eval.every_steps=0", "checkpoint.best_metric=null")

STOPPED = """\
import os, signal, time
import cli
from app.rollout.sample_generator import SampleGenerator
from app.distributed.stop_check import StoppedError

generate, calls = SampleGenerator.generate, []
def generate_or_stop(engine, *arguments, **named):
    samples = generate(engine, *arguments, **named)
    calls.append(samples)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        while not engine.stop_requested():
            os.sched_yield()
        raise StoppedError
    return samples
SampleGenerator.generate = generate_or_stop
cli.main()
"""
"""The command, with the third rollout stopped on this host as at the end of a segment."""

FAILING = (
    STOPPED[: STOPPED.index("        os.kill")]
    + """\
        raise RuntimeError("no idea")
    return samples
SampleGenerator.generate = generate_or_stop
cli.main()
"""
)

LATE = """\
import os, threading
import cli
from app.mesh import jax_startup
from app.distributed import shutdown
from app.tracking.run_reporter import RunReporter

jax_startup.SHUTDOWN_TIMEOUT_S = shutdown.COMMON_FAILURE_WINDOW_S = 1
def report(reporter):
    if os.environ["THIS_HOST"] == "0":
        threading.Event().wait(4)
RunReporter.write_final_report = report
cli.main()
"""
"""The command, with a report on the first host that takes longer than JAX waits, and than hosts that fail together."""


def command(config: Path, *overrides: str) -> list[str | Path]:
    return ["train", "--config", config, *settings(*overrides)]


def test_a_rollout_that_one_host_leaves_is_given_up_by_both_with_a_checkpoint(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    arguments = command(config, *SMALL, "checkpoint.every_steps=100")
    first, second = run_on_two_hosts(*arguments, num_devices=2, programs=(HOSTS_PROGRAM, ("-c", KEEPING + STOPPED)))
    assert (first.exit_code, second.exit_code) == (75, 75), first.stderr + second.stderr
    assert (
        "stopped after step 2 of 100000, which is saved; --resume auto goes on (asked to stop: host 1)" in first.stderr
    )
    assert "stopping with a checkpoint" in second.stderr and "stopping with a checkpoint" not in first.stderr
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert newest_checkpoint(run) == 2


def test_a_dead_host_ends_the_other_and_the_run_goes_on(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    program = hosts_program(heartbeat_s=HEARTBEAT_S)
    arguments = command(config, *SMALL, "checkpoint.every_steps=1")
    with two_hosts(*arguments, num_devices=2, programs=(program, program)) as hosts:
        wait_for_step(hosts[0], run, 2)
        os.kill(hosts[1].pid, signal.SIGKILL)
        start = time.monotonic()
        first, second = ended(hosts)
        seconds = time.monotonic() - start
    # 134 and 137, to a shell.
    assert (first.exit_code, second.exit_code) == (-signal.SIGABRT, -signal.SIGKILL), first.stderr + second.stderr
    assert seconds < HEARTBEAT_S + 10
    assert "another task died" in first.stderr
    assert "stopped after" not in first.stderr and "Traceback" not in first.stderr
    last = newest_checkpoint(run)
    assert metrics_of(run)[-1]["step"] >= last
    result = train_here(config, *ON_ONE_HOST, f"run.steps={last + 1}", resume="must")
    assert result.exit_code == 0, result.stderr
    assert [line["step"] for line in metrics_of(run)] == list(range(1, last + 2))


def test_a_host_that_fails_alone_ends_the_other(config: Path) -> None:
    programs = HOSTS_PROGRAM, ("-c", KEEPING + FAILING)
    first, second = run_on_two_hosts(*command(config, *SMALL), num_devices=2, programs=programs)
    assert (first.exit_code, second.exit_code) == (1, 1), first.stderr + second.stderr
    assert "error: RuntimeError: no idea" in second.stderr
    assert "host 1 has failed, so this host exits: no idea" in first.stderr


def test_hosts_that_fail_together_end_alike_whatever_the_first_has_to_write(config: Path) -> None:
    file = config.parent / "reward.py"
    # Right in the trial before the run, which is of the reference answer.
    file.write_text("def broken(completions, answer):\n    return [{a: 1.0}[c] for c, a in zip(completions, answer)]\n")
    reward = (f"reward.functions=['{file}:broken']", "reward.on_error=raise")
    arguments = command(config, *SMALL, *reward)
    hosts = run_on_two_hosts(*arguments, num_devices=2, programs=(("-c", KEEPING + LATE), ("-c", KEEPING + LATE)))
    assert [host.exit_code for host in hosts] == [1, 1], hosts


def test_a_missing_host_is_named(config: Path) -> None:
    alone = settings(*of_host(0, free_address()), "mesh.start_timeout_s=1")
    with started("inspect-mesh", "--config", config, *alone) as host:
        _, stderr = host.communicate(timeout=DEADLINE_S)
    assert host.returncode == 2, stderr
    assert "from process 1 of 2" in stderr and "grpo inspect-mesh" in stderr and "Traceback" not in stderr
