"""Ctrl-C and SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from app.training.interrupts import Interrupts
from tests.training.program import (
    DEADLINE_S,
    REPOSITORY,
    assert_same_run,
    metrics_of,
    settings,
    started,
    train_here,
    wait_for_step,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM)

BUSY = """\
import jax
from app.training.interrupts import Interrupts
forever = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, lambda x: x * 1.0, x))
with Interrupts():
    print("ready", flush=True)
    forever(1.0).block_until_ready()
"""


def test_ctrl_c_ends_the_step_saves_and_the_run_can_go_on(full_config: Path, uninterrupted: Path) -> None:
    run = full_config.parent / "runs" / "full"
    with started("train", "--config", full_config) as process:
        wait_for_step(process, run, 1)
        os.kill(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, stderr
    assert "stopping after this step, with a checkpoint; once more stops at once" in stderr
    assert "Traceback" not in stderr
    assert f"everything is in {run}" in stdout
    last = metrics_of(run)[-1]["step"]
    assert 1 <= last < 12
    assert (run / "checkpoints" / str(last)).is_dir()
    result = train_here(full_config, resume="must")
    assert result.exit_code == 0, result.stderr
    assert f"continuing after step {last} of 12" in result.stderr
    assert_same_run(run, uninterrupted, step=12)


def test_sigterm_saves_and_says_run_again(config: Path) -> None:
    run = config.parent / "runs" / "tiny"
    endless = settings("run.steps=10000", "eval.every_steps=0", "logging.report=true")
    with started("train", "--config", config, *endless) as process:
        wait_for_step(process, run, 1)
        os.kill(process.pid, signal.SIGTERM)
        _, stderr = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 75, stderr
    last = metrics_of(run)[-1]["step"]
    assert (run / "checkpoints" / str(last)).is_dir()
    assert f"step {last} of 10000" in (run / "report.html").read_text()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_stops_at_once_even_inside_a_compiled_program(number: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, number)
        # Python's own handlers would run only when the program ends, which it never does.
        assert process.stderr.readline() + process.stderr.readline() == (
            "\nstopping after this step, with a checkpoint; once more stops at once\n"
        )
        os.kill(process.pid, number)
        assert process.wait(timeout=DEADLINE_S) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_handlers_are_what_they_were_afterwards() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    with Interrupts() as interrupts:
        assert [signal.getsignal(number) for number in SIGNALS] != before
        assert interrupts.agreed(1) == (0, False)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(descriptor) == descriptor


def test_where_several_processes_train_sigterm_is_left_to_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    before = [signal.getsignal(number) for number in SIGNALS]
    with Interrupts():
        during = [signal.getsignal(number) for number in SIGNALS]
    assert during[0] != before[0]
    assert during[1] == before[1]
