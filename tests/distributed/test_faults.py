"""Tests of two processes of which one is stopped, dies, fails or hangs; the other must never wait forever."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.program import metrics_of, newest_checkpoint, settings, train_here, wait_for_step
from tests.two_hosts import HOSTS_PROGRAM, KEEPING, Ended, ended, run_on_two_hosts, two_hosts

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

STUCK = """\
import os, threading
def stuck(prompts, completions, trainer_state, **rest):
    if os.environ["THIS_HOST"] == "1" and trainer_state.global_step == 2:
        threading.Event().wait()
    return [0.0] * len(completions)
"""


def command(config: Path, *overrides: str) -> list[str | Path]:
    return ["train", "--config", config, *settings(f"mesh.heartbeat_s={HEARTBEAT_S}", *overrides)]


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
    with two_hosts(*command(config, *SMALL, "checkpoint.every_steps=1"), num_devices=2) as hosts:
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


def test_a_host_that_hangs_ends_both_and_says_where(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    hosts = with_reward(config, STUCK, "watchdog.phase_s=30", "plugins.timeout_s=3600")
    assert [host.exit_code for host in hosts] == [70, 70], hosts
    for i, host in enumerate(hosts):
        written = (run / "crash" / f"host_{i}.txt").read_text()
        for text in (written, host.stderr):
            assert f"watchdog: host {i} has been in phase reward of step 2 for " in text
            assert "watchdog.phase_s = 30" in text
            assert "in gather_lines_to_first_host" in text or "function_pool.py" in text


def test_a_host_that_fails_alone_ends_the_other(config: Path) -> None:
    programs = HOSTS_PROGRAM, ("-c", KEEPING + FAILING)
    first, second = run_on_two_hosts(*command(config, *SMALL), num_devices=2, programs=programs)
    assert (first.exit_code, second.exit_code) == (1, 1), first.stderr + second.stderr
    assert "error: RuntimeError: no idea" in second.stderr
    assert "host 1 has failed, so this host exits: no idea" in first.stderr


def test_a_host_that_is_done_waits_for_the_first_to_write_its_report(config: Path) -> None:
    arguments = command(config, *SMALL[1:], "run.steps=1")
    hosts = run_on_two_hosts(*arguments, num_devices=2, programs=(("-c", KEEPING + LATE), ("-c", KEEPING + LATE)))
    assert [host.exit_code for host in hosts] == [0, 0], hosts


def test_hosts_that_fail_together_end_alike_whatever_the_first_has_to_write(config: Path) -> None:
    file = config.parent / "reward.py"
    # Right in the trial before the run, which is of the reference answer.
    file.write_text("def broken(completions, answer):\n    return [{a: 1.0}[c] for c, a in zip(completions, answer)]\n")
    reward = (f"reward.functions=['{file}:broken']", "reward.on_error=raise")
    arguments = command(config, *SMALL, *reward)
    hosts = run_on_two_hosts(*arguments, num_devices=2, programs=(("-c", KEEPING + LATE), ("-c", KEEPING + LATE)))
    assert [host.exit_code for host in hosts] == [1, 1], hosts


def with_reward(config: Path, source: str, *overrides: str) -> tuple[Ended, Ended]:
    """Runs two hosts with a reward function `stuck`, and returns how they end."""
    file = config.parent / "reward.py"
    file.write_text(source)
    reward = (f"reward.functions=['{file}:stuck']", "plugins.env_vars=[THIS_HOST]")
    return run_on_two_hosts(*command(config, *SMALL, *reward, *overrides), num_devices=2)
