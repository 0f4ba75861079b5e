"""Two processes of which one is asked to stop, dies, fails or hangs. None of it leaves the other waiting."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.free_address import free_address
from tests.training.program import (
    DEADLINE_S,
    metrics_of,
    newest_checkpoint,
    settings,
    started,
    train_here,
    wait_for_step,
)

pytestmark = pytest.mark.two_hosts

HEARTBEAT_S = 3
SMALL = ("run.steps=100000", "eval.every_steps=0", "checkpoint.best_metric=null", "rollout.prompts_per_step=2")
ON_ONE_HOST = ("eval.every_steps=0", "checkpoint.best_metric=null")

STOPPED = """\
import os, signal, time
import cli
from app.rollout.engine import Engine
from app.rollout.stopping import StoppedError

generate, calls = Engine.generate, []
def generate_or_stop(engine, *arguments, **named):
    samples = generate(engine, *arguments, **named)
    calls.append(samples)
    if len(calls) == 3:
        os.kill(os.getpid(), signal.SIGTERM)
        while not engine.asked_to_stop():
            os.sched_yield()
        raise StoppedError
    return samples
Engine.generate = generate_or_stop
cli.main()
"""
"""The command, but that its third rollout ends, on this host alone, as at the edge of a segment."""

FAILING = (
    STOPPED[: STOPPED.index("        os.kill")]
    + """\
        raise RuntimeError("no idea")
    return samples
Engine.generate = generate_or_stop
cli.main()
"""
)

LATE = """\
import os, threading
import cli
from app.mesh import topology
from app.training import parting
from app.training.narrator import Narrator

topology.SHUTDOWN_TIMEOUT_S = parting.MET_S = 1
def report(narrator):
    if os.environ["THIS_HOST"] == "0":
        threading.Event().wait(4)
Narrator.report = report
cli.main()
"""
"""The command, but that the first host's report takes longer than JAX waits, and than hosts that fail alike do."""

STUCK = """\
import os, threading
def stuck(prompts, completions, trainer_state, **rest):
    if os.environ["THIS_HOST"] == "1" and trainer_state.global_step == 2:
        threading.Event().wait()
    return [0.0] * len(completions)
"""


@contextmanager
def two_hosts(
    config: Path, *overrides: str, first: Sequence[str] = ("-m", "cli"), second: Sequence[str] = ("-m", "cli")
) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of two devices each; `first` and `second` are what they run."""
    address = free_address()
    mesh = ("mesh.cpu_devices=2", f"mesh.heartbeat_s={HEARTBEAT_S}", "mesh.num_processes=2")
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                started(
                    *("train", "--config", config),
                    *settings(*mesh, f"mesh.coordinator_address={address}", f"mesh.process_id={i}", *overrides),
                    environ={"THIS_HOST": str(i)},
                    program=program,
                )
            )
            for i, program in enumerate((first, second))
        ]


def ended(hosts: list[subprocess.Popen[str]]) -> list[str]:
    """What they have said."""
    return [host.communicate(timeout=DEADLINE_S)[1] for host in hosts]


def test_a_rollout_that_one_host_leaves_is_given_up_by_both_with_a_checkpoint(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    with two_hosts(config, *SMALL, "checkpoint.every_steps=100", second=("-c", STOPPED)) as hosts:
        said = ended(hosts)
    assert [host.returncode for host in hosts] == [75, 75], said
    assert "stopped after step 2 of 100000, which is saved; --resume auto goes on (asked to stop: host 1)" in said[0]
    assert "stopping with a checkpoint" in said[1] and "stopping with a checkpoint" not in said[0]
    assert [line["step"] for line in metrics_of(run)] == [1, 2]
    assert newest_checkpoint(run) == 2


def test_a_dead_host_ends_the_other_and_the_run_goes_on(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    with two_hosts(config, *SMALL, "checkpoint.every_steps=1") as hosts:
        wait_for_step(hosts[0], run, 2)
        os.kill(hosts[1].pid, signal.SIGKILL)
        start = time.monotonic()
        said = ended(hosts)
        seconds = time.monotonic() - start
    assert [host.returncode for host in hosts] == [-signal.SIGABRT, -signal.SIGKILL], said  # 134 and 137, to a shell
    assert seconds < HEARTBEAT_S + 10
    assert "another task died" in said[0]
    assert "stopped after" not in said[0] and "Traceback" not in said[0]
    last = newest_checkpoint(run)
    assert metrics_of(run)[-1]["step"] >= last
    result = train_here(config, *ON_ONE_HOST, f"run.steps={last + 1}", resume="must")
    assert result.exit_code == 0, result.stderr
    assert [line["step"] for line in metrics_of(run)] == list(range(1, last + 2))


def test_a_host_that_hangs_ends_both_and_says_where(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    said = with_reward(config, STUCK, "watchdog.reward_s=2", "reward.timeout_s=3600")
    assert [code for code, _ in said] == [70, 70], said
    for i, (_, stderr) in enumerate(said):
        written = (run / "crash" / f"host_{i}.txt").read_text()
        for text in (written, stderr):
            assert f"watchdog: host {i} has been in phase reward of step 2 for " in text
            assert "watchdog.reward_s = 2" in text
            assert "in check_rewards" in text or "in _wait" in text


def test_a_host_that_fails_alone_ends_the_other(config: Path) -> None:
    with two_hosts(config, *SMALL, second=("-c", FAILING)) as hosts:
        start = time.monotonic()
        said = ended(hosts)
    assert [host.returncode for host in hosts] == [1, 1], said
    assert "error: RuntimeError: no idea" in said[1]
    assert "host 1 has failed, so this one ends: no idea" in said[0]
    assert time.monotonic() - start < DEADLINE_S


def test_a_host_that_is_done_waits_for_the_first_to_write_its_report(config: Path) -> None:
    with two_hosts(config, *SMALL[1:], "run.steps=1", first=("-c", LATE), second=("-c", LATE)) as hosts:
        said = ended(hosts)
    assert [host.returncode for host in hosts] == [0, 0], said


def test_hosts_that_fail_together_end_alike_whatever_the_first_has_to_write(config: Path) -> None:
    file = config.parent / "reward.py"
    file.write_text("def broken(completions, **rest):\n    raise ValueError('no idea')\n")
    reward = (f"reward.functions=['{file}:broken']", "reward.on_error=raise")
    with two_hosts(config, *SMALL, *reward, first=("-c", LATE), second=("-c", LATE)) as hosts:
        said = ended(hosts)
    assert [host.returncode for host in hosts] == [1, 1], said


def with_reward(config: Path, source: str, *overrides: str) -> list[tuple[int, str]]:
    """How two hosts end whose reward function is called `stuck`, and what they say."""
    file = config.parent / "reward.py"
    file.write_text(source)
    reward = (f"reward.functions=['{file}:stuck']", "reward.environment=[THIS_HOST]")
    with two_hosts(config, *SMALL, *reward, *overrides) as hosts:
        said = ended(hosts)
    return [(host.returncode, stderr) for host, stderr in zip(hosts, said, strict=True)]
