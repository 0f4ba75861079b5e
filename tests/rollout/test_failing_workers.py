"""Tests of workers that fail before, between and after segments, and of bugs, which are not failures of workers."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Event, Thread
from typing import Any

import pytest

from app.rollout.scheduling.protocol import WorkerJoined, WorkerLost
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import RolloutWorker
from tests.rollout.test_slot_engine import DEFINITION, FLOAT32, PROMPTS, REQUEST, weights_on
from tests.rollout.test_worker_drivers import (
    KINDS,
    Mortal,
    bits,
    engine_on,
    expected,
    mesh_of,
    samples_of,
    scheduled,
    workers_on,
)


class Failing(Mortal):
    """A worker that fails once at the point that `at` names."""

    at = ""
    error: BaseException = RuntimeError("RESOURCE_EXHAUSTED")

    def _fail(self, at: str) -> None:
        if self.at == at:
            self.at = ""
            raise self.error

    def open(self, *arguments: Any, **named: Any) -> None:
        super().open(*arguments, **named)
        self._fail("open")

    def start_segment(self, **limits: Any) -> None:
        self._fail("start")
        super().start_segment(**limits)

    def suspend(self, rows: Sequence[RolloutSequence]) -> list[SuspendedSequence]:
        if rows:
            self._fail("suspend")
        return super().suspend(rows)


def failing(at: str, *, error: BaseException = Failing.error) -> list[RolloutWorker]:
    """Returns a fast worker that fails and a heavy worker that does not."""
    usual = engine_on(0)
    engine = Failing(
        *(DEFINITION, mesh_of(0), usual.shapes), eos_ids=(), dtype=FLOAT32, exact=True, programs=usual.programs
    )
    engine.at, engine.error = at, error
    return [RolloutWorker("fast-0", KINDS[0], engine), workers_on(2)[1]]


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("at", ["suspend", "start"])
def test_a_worker_that_fails_between_segments_does_nothing_more(at: str, in_turn: bool) -> None:
    made = scheduled(failing(at), "pdsr_v1", in_turn=in_turn)
    assert bits(samples_of(made)) == bits(expected())
    (lost,) = [record.event for record in made.records if isinstance(record.event, WorkerLost)]
    assert lost.worker == "fast-0" and "RESOURCE_EXHAUSTED" in lost.why
    assert bits(samples_of(made)) == bits(expected())


def test_a_worker_that_cannot_start_is_left_out_and_frees_its_memory() -> None:
    workers = failing("open")
    made = scheduled(workers)
    assert bits(samples_of(made)) == bits(expected())
    assert {record.event.worker for record in made.records if isinstance(record.event, WorkerJoined)} == {"heavy-1"}
    assert workers[0].engine._cache.arrays == ()


def test_where_no_worker_can_start_the_last_ones_error_is_raised() -> None:
    with pytest.raises(RuntimeError, match="RESOURCE_EXHAUSTED"):
        samples_of(scheduled(failing("open")[:1]))


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_bug_is_no_dead_worker(in_turn: bool) -> None:
    with pytest.raises(KeyError, match="slip"):
        samples_of(scheduled(failing("start", error=KeyError("slip")), in_turn=in_turn))


def test_closing_waits_for_a_sleeping_worker_no_longer_than_its_lease() -> None:
    workers = workers_on(2)
    sleeper = workers[1].engine
    assert isinstance(sleeper, Mortal)
    sleeper.sleep = Event()
    made = scheduled(workers, lease_s=1.0)
    stream = made.stream(weights_on(), PROMPTS, REQUEST)
    next(stream)
    closing = Thread(target=stream.close)  # pyright: ignore[reportAttributeAccessIssue]
    closing.start()
    closing.join(timeout=60.0)
    assert not closing.is_alive()
    assert set(made._stalled) == {workers[1]}
    sleeper.sleep.set()
    for thread in made._stalled.values():
        thread.join()
    sleeper.sleep = None
    assert bits(samples_of(made)) == bits(expected())


def test_a_segment_that_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.rollout.workers.worker_drivers.CLOSE_TIMEOUT_S", 0.2)
    workers = workers_on(2)
    sleeper = workers[1].engine
    assert isinstance(sleeper, Mortal)
    sleeper.sleep = Event()
    # The first sample is the first worker's, and stays there.
    made = scheduled(workers, "sync")
    stream = made.stream(weights_on(), PROMPTS, REQUEST)
    next(stream)
    stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert set(made._stalled) == {workers[1]}
    sleeper.sleep.set()
    for thread in made._stalled.values():
        thread.join()
    sleeper.sleep = None
    assert bits(samples_of(made)) == bits(expected())
