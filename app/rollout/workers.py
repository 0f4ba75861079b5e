"""Workers: a slot engine each, on devices of its own with a thread of its own, or in turn with the others.

A worker does what the scheduler's commands say and reports what its rows have become. A driver lets several of them
run: `Threads` side by side, `Turns` by one thread, in an order that does not depend on how long anything takes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import jax

from app.policy.kv_cache import DecodeWeights
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import Kind, RowReport, RunSegment, SegmentEnded
from app.rollout.slots import Row, SlotEngine, Suspended

Clock = Callable[[], float]
"""Seconds from any moment on."""


class Admission(NamedTuple):
    """A row that comes into a worker."""

    row: Row
    uid: str
    epoch: int
    num_tokens: int
    """All three as the scheduler knows it."""
    kept: Future[Suspended] | None
    """Where its cache comes from; None: it is computed from the row."""


@dataclass(eq=False)
class Worker:
    """Slots that a scheduler commands. One thread at a time."""

    name: str
    kind: Kind
    engine: SlotEngine
    device: str | None = None
    """Workers with the same one take turns on it; None: devices of its own."""
    clock: Clock = time.perf_counter
    _known_as: dict[Row, Admission] = field(default_factory=dict)
    """Rows in its slots -> how they came."""
    _running: tuple[RunSegment, float] | None = None
    """The segment, and when it was started."""

    def open(
        self, weights: DecodeWeights, *, rules: SamplingRules, seed: int, policy_version: int, suspends: bool
    ) -> None:
        """Empty slots, and the weights on the worker's devices; see `SlotEngine.open`."""
        placed = jax.device_put(weights, _shardings(self.engine.programs.abstract_weights))
        self.engine.open(placed, rules=rules, seed=seed, policy_version=policy_version, suspends=suspends)

    def close(self) -> None:
        self._known_as, self._running = {}, None
        self.engine.close()

    def suspend(self, row: Row) -> Suspended:
        """Takes it out, with its cache."""
        del self._known_as[row]
        return self.engine.suspend([row])[0]

    def begin(self, command: RunSegment, admissions: Sequence[Admission]) -> None:
        """Admits rows and sets the segment going."""
        started = self.clock()
        self._known_as |= {one.row: one._replace(kept=None) for one in admissions}
        self.engine.admit([self._ready(one) for one in admissions])
        if not command.leave_when_finished:
            self.engine.compact()
        self.engine.start(
            length=command.length,
            leave_when_finished=command.leave_when_finished or None,
            leave_when_active=command.leave_when_active,
        )
        self._running = command, started

    def _ready(self, one: Admission) -> Row | Suspended:
        if one.kept is None:
            return Suspended(one.row, None) if one.row.num_tokens else one.row
        if one.kept.exception() is not None:
            return Suspended(one.row, None)
        cache = one.kept.result().cache
        shapes = self.engine.programs.abstract_cache(1, self.engine.shapes.max_length)
        return Suspended(one.row, jax.device_put(cache, _shardings(shapes)))

    def end(self, *, not_before: float = 0.0) -> SegmentEnded:
        """Waits for the segment; its tokens have come from the devices, too.

        Args:
            not_before: when the segment could begin at the earliest, because another had the devices.
        """
        assert self._running is not None
        (command, started), self._running = self._running, None
        segment = self.engine.wait()
        # Before it is reported: what is committed must be there, whatever becomes of the worker.
        segment.collect()
        at = self.clock()
        reports = []
        for _, row, _ in segment.ran:
            known = self._known_as[row]
            # What is drawn again was there before.
            num_tokens = max(row.num_tokens, known.num_tokens)
            reports.append(RowReport(known.uid, known.epoch, num_tokens, row.finish_reason))
            if row.finish_reason is not None:
                del self._known_as[row]
        seconds = at - max(started, not_before)
        return SegmentEnded(at, self.name, command.segment, tuple(reports), seconds, segment.steps)


def _shardings(shapes: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, shapes)


class Outcome(NamedTuple):
    """What a worker has to say: a segment has ended, or it has failed."""

    worker: Worker
    said: SegmentEnded | Exception


class Driver(Protocol):
    """Lets workers do what they are told."""

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]: ...

    def run(self, worker: Worker, command: RunSegment, admissions: Sequence[Admission]) -> None: ...

    def next(self) -> Outcome:
        """Waits for the next worker that has something to say."""
        ...

    def close(self) -> None:
        """Waits for whatever still runs."""
        ...


class Threads:
    """A thread for each worker. Whoever is done first is heard first."""

    def __init__(self, workers: Sequence[Worker]):
        self._threads = {worker: ThreadPoolExecutor(1, thread_name_prefix=worker.name) for worker in workers}
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]:
        future = self._threads[worker].submit(worker.suspend, row)
        future.add_done_callback(lambda done: self._tell_failure(worker, done))
        return future

    def run(self, worker: Worker, command: RunSegment, admissions: Sequence[Admission]) -> None:
        future = self._threads[worker].submit(self._segment, worker, command, admissions)
        future.add_done_callback(lambda done: self._tell_failure(worker, done))

    def _segment(self, worker: Worker, command: RunSegment, admissions: Sequence[Admission]) -> None:
        worker.begin(command, admissions)
        self._outcomes.put(Outcome(worker, worker.end()))

    def _tell_failure(self, worker: Worker, done: Future[Any]) -> None:
        error = None if done.cancelled() else done.exception()
        if error is not None:
            self._outcomes.put(Outcome(worker, error if isinstance(error, Exception) else RuntimeError(repr(error))))

    def next(self) -> Outcome:
        return self._outcomes.get()

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)


class Turns:
    """One thread for all workers. Segments are heard in the order in which they were started.

    The devices are busy with the next segments meanwhile, whether the workers share them or not.
    """

    def __init__(self) -> None:
        self._turns: deque[tuple[Worker, Exception | None]] = deque()
        self._free_at: dict[str, float] = {}
        """Device that is shared -> when its last segment ended."""

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]:
        future: Future[Suspended] = Future()
        try:
            future.set_result(worker.suspend(row))
        except Exception as error:
            future.set_exception(error)
            self._turns.append((worker, error))
        return future

    def run(self, worker: Worker, command: RunSegment, admissions: Sequence[Admission]) -> None:
        try:
            worker.begin(command, admissions)
            self._turns.append((worker, None))
        except Exception as error:
            self._turns.append((worker, error))

    def next(self) -> Outcome:
        worker, failure = self._turns.popleft()
        if failure is not None:
            return Outcome(worker, failure)
        device = worker.device or worker.name
        try:
            ended = worker.end(not_before=self._free_at.get(device, 0.0))
        except Exception as error:
            return Outcome(worker, error)
        self._free_at[device] = ended.at
        return Outcome(worker, ended)

    def close(self) -> None:
        self._turns.clear()
