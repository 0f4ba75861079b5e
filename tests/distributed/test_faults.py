"""Tests that a host does not wait forever if the other one is stopped, dies or is missing."""

import os
import signal
from pathlib import Path

import pytest

from tests import program
from tests.two_hosts import HOSTS_PROGRAM, KEEPING, ended, hosts_program, of_host, run_on_two_hosts, two_hosts

pytestmark = pytest.mark.two_hosts

HEARTBEAT_S = 3
SMALL = ("run.steps=100000", "eval.every_steps=0", "checkpoint.best_metric=null", "rollout.prompts_per_step=2")
ON_ONE_HOST = ("eval.every_steps=0", "checkpoint.best_metric=null")

STOPPED = """\
import os, signal, time
import cli
from app.rollout.engine.sample_generator import SampleGenerator
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
"""Program that runs the command and stops the third rollout on this host, as at the end of a segment."""


def command(config: Path, *overrides: str) -> list[str | Path]:
    return ["train", "--config", config, *program.settings(*overrides)]


def test_a_signal_to_one_host_stops_both_with_a_checkpoint(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    arguments = command(config, *SMALL, "checkpoint.every_steps=100")
    first, second = run_on_two_hosts(*arguments, num_devices=2, programs=(HOSTS_PROGRAM, ("-c", KEEPING + STOPPED)))
    assert (first.exit_code, second.exit_code) == (75, 75), first.stderr + second.stderr
    assert "after step 2 of 100000, which is saved; --resume auto continues (asked to stop: host 1)" in first.stderr
    assert "stopping with a checkpoint" in second.stderr and "stopping with a checkpoint" not in first.stderr
    assert [line["step"] for line in program.metrics_of(run)] == [1, 2]
    assert program.newest_checkpoint(run) == 2


def test_a_dead_host_ends_the_other_and_the_run_can_continue(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    launched = hosts_program(heartbeat_s=HEARTBEAT_S)
    arguments = command(config, *SMALL, "checkpoint.every_steps=1")
    with two_hosts(*arguments, num_devices=2, programs=(launched, launched)) as hosts:
        program.wait_for_step(hosts[0], run, 2)
        os.kill(hosts[1].pid, signal.SIGKILL)
        first, second = ended(hosts)
    # A shell reports these as 134 and 137.
    assert (first.exit_code, second.exit_code) == (-signal.SIGABRT, -signal.SIGKILL), first.stderr + second.stderr
    assert "another task died" in first.stderr
    assert "stopped after" not in first.stderr and "Traceback" not in first.stderr
    last = program.newest_checkpoint(run)
    assert program.metrics_of(run)[-1]["step"] >= last
    program.succeeded(program.train_here(config, *ON_ONE_HOST, f"run.steps={last + 1}", resume="must"))
    assert [line["step"] for line in program.metrics_of(run)] == list(range(1, last + 2))


def test_start_error_names_the_missing_process(config: Path) -> None:
    alone = program.settings(*of_host(0, program.free_address()), "mesh.start_timeout_s=1")
    with program.started("inspect-mesh", "--config", config, *alone) as host:
        _, stderr = host.communicate(timeout=program.DEADLINE_S)
    assert host.returncode == 2, stderr
    assert "from process 1 of 2" in stderr and "grpo inspect-mesh" in stderr and "Traceback" not in stderr
