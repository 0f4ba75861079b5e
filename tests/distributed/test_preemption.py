"""Tests that Ctrl-C, SIGTERM and SIGHUP stop a run with a checkpoint."""

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from app.distributed.preemption import FINISHING_MESSAGE, PreemptionHandler
from app.distributed.status_board import StatusBoard
from app.distributed.stop_check import StoppedError
from app.rollout.engine.sample_generator import SampleGenerator
from app.tracking.run_reporter import RunReporter
from tests import program

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

SAID = (
    "stopping with a checkpoint: a step still generating is dropped, an update is completed; "
    "a second signal stops at once"
)

BUSY = """\
import jax
from app.distributed.status_board import StatusBoard
from app.distributed.preemption import PreemptionHandler
forever = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, jax.lax.sin, x))
with PreemptionHandler(StatusBoard(None, host=0)):
    print("ready", flush=True)
    forever(1.0).block_until_ready()
"""


@pytest.fixture(autouse=True)
def hears_signals() -> Iterator[None]:
    """Restores the default signal handlers, which nohup or another test may have changed."""
    before = [(number, signal.signal(number, signal.SIG_DFL)) for number in SIGNALS]
    yield
    for number, handler in before:
        signal.signal(number, handler)


def test_a_run_continues_after_sighup_if_its_process_ignores_it() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with PreemptionHandler(StatusBoard(None, host=0)) as interrupts:
        os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupts.stop_requested()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_second_signal_stops_at_once_even_inside_a_compiled_program() -> None:
    with program.started(program=("-c", BUSY)) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "ready\n"
        os.kill(process.pid, signal.SIGTERM)
        # Python's own handlers would run only when the program ends, which it never does.
        assert process.stderr.readline() + process.stderr.readline() == f"\n{SAID}\n"
        start = time.monotonic()
        # A signal within a second after the first counts as its echo.
        while process.poll() is None and time.monotonic() < start + program.DEADLINE_S:
            os.kill(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
        assert process.returncode == 130
        assert time.monotonic() > start + 0.9


def test_previous_signal_handlers_are_restored_when_preemption_handling_ends() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    descriptor = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(descriptor)
    with PreemptionHandler(StatusBoard(None, host=0)) as interrupts:
        assert [signal.getsignal(number) for number in SIGNALS] != before
        assert not interrupts.stop_requested()
        assert interrupts.sync_stop_decision() == (0, False, False, ())
    assert [signal.getsignal(number) for number in SIGNALS] == before
    assert signal.set_wakeup_fd(descriptor) == descriptor


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGHUP, 75), (signal.SIGINT, 130)])
def test_a_signal_requests_a_stop_with_its_exit_code(number: int, code: int) -> None:
    with PreemptionHandler(StatusBoard(None, host=0)) as interrupts:
        os.kill(os.getpid(), number)
        program.wait_for(interrupts.stop_requested)
        assert interrupts.sync_stop_decision(save_is_due=True) == (code, True, False, (0,))


def test_a_run_stopped_by_sighup_resumes_bit_for_bit(config, finished, monkeypatch):
    run = config.parent / "runs" / "tiny"
    generate, report, calls = SampleGenerator.stream, RunReporter.write_final_report, itertools.count(1)

    def generate_or_stop(engine: SampleGenerator, *arguments: Any, **named: Any) -> Any:
        if next(calls) != 4:  # evaluation, steps 1 and 2, evaluation
            return generate(engine, *arguments, **named)
        os.kill(os.getpid(), signal.SIGHUP)
        program.wait_for(engine.stop_requested)
        raise StoppedError

    def signalled_report(reporter: RunReporter) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        report(reporter)

    with monkeypatch.context() as patch:
        patch.setattr(SampleGenerator, "stream", generate_or_stop)
        result = program.train_here(config, "logging.report=true")
    assert result.exit_code == 75 and SAID in result.stderr, result.stderr
    assert "stopped after step 2 of 4, which is saved; --resume auto continues, with the evaluation" in result.stderr
    assert program.newest_checkpoint(run) == 2
    # Only complete steps are reported.
    assert [line["step"] for line in program.metrics_of(run)] == [0, 1]
    assert "step 1 of 4" in (run / "report.html").read_text()
    # After the last step, the message says that nothing is lost.
    monkeypatch.setattr(RunReporter, "write_final_report", signalled_report)
    result = program.succeeded(program.train_here(config, resume="must"))
    assert FINISHING_MESSAGE in result.stderr and SAID not in result.stderr
    program.assert_same_run(run, finished, step=4)
    starts = [json.loads(line)["after_step"] for line in (run / "sessions.jsonl").read_text().splitlines()]
    assert starts == [0, 2]
