"""Workers: a slot engine each, on devices of its own with a thread of its own, or in turn with the others.

A worker does what the scheduler's commands say and reports what its rows have become. A driver lets several of them
run: `Threads` side by side, `Turns` by one thread, in an order that does not depend on how long anything takes.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple, Protocol

import jax

from app.policy.kv_cache import DecodeWeights
from app.rollout.rows import Row, Suspended
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import Kind, RowReport, RunSegment, SegmentEnded
from app.rollout.slots import SlotEngine

Clock = Callable[[], float]
"""Seconds from any moment on."""


class Admission(NamedTuple):
    """A row that comes into a worker."""

    row: Row
    uid: str
    epoch: int
    """As the scheduler knows it."""
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
            leave_when_finished=command.leave_when_finished,
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
            known, row.worker = self._known_as[row], self.name
            reports.append(RowReport(known.uid, known.epoch, row.num_tokens, row.finish_reason))
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

    def close(self) -> Mapping[Worker, Thread]:
        """Waits for whatever still runs, but for workers that have stalled. Returns these."""
        ...


class Threads:
    """A thread for each worker. Whoever is done first is heard first.

    Args:
        lease_s: how long a worker may be silent in a segment until it counts as failed; None: any time.
    """

    def __init__(self, workers: Sequence[Worker], *, lease_s: float | None):
        self._lease_s = lease_s
        self._inboxes: dict[Worker, SimpleQueue[_Job | None]] = {worker: SimpleQueue() for worker in workers}
        self._outcomes: SimpleQueue[Outcome] = SimpleQueue()
        self._due: dict[Worker, float] = {}
        """When the lease of a worker that is in a segment ends, of `time.monotonic`."""
        self._stalled: set[Worker] = set()
        # Daemons: one that never comes back must not keep the program from ending.
        self._threads = {
            worker: Thread(target=_serve, args=(inbox,), name=worker.name, daemon=True)
            for worker, inbox in self._inboxes.items()
        }
        for thread in self._threads.values():
            thread.start()

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]:
        return self._ask(worker, lambda: worker.suspend(row))

    def run(self, worker: Worker, command: RunSegment, admissions: Sequence[Admission]) -> None:
        def segment() -> None:
            worker.begin(command, admissions)
            self._outcomes.put(Outcome(worker, worker.end()))

        self._due[worker] = time.monotonic() + (math.inf if self._lease_s is None else self._lease_s)
        self._ask(worker, segment)

    def _ask(self, worker: Worker, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.add_done_callback(lambda done: self._tell_failure(worker, done.exception()))
        self._inboxes[worker].put((future, work))
        return future

    def _tell_failure(self, worker: Worker, error: BaseException | None) -> None:
        if isinstance(error, Exception):
            self._outcomes.put(Outcome(worker, error))

    def next(self) -> Outcome:
        left = min(self._due.values(), default=math.inf) - time.monotonic()
        try:
            outcome = self._outcomes.get(timeout=None if left == math.inf else max(left, 0.0))
        except Empty:
            late = min(self._due, key=lambda worker: self._due[worker])
            outcome = Outcome(late, TimeoutError(f"silent for {self._lease_s} s"))
            self._stalled.add(late)
        self._due.pop(outcome.worker, None)
        return outcome

    def close(self) -> dict[Worker, Thread]:
        for inbox in self._inboxes.values():
            inbox.put(None)
        for worker in self._threads.keys() - self._stalled:
            self._threads[worker].join()
        return {worker: self._threads[worker] for worker in self._stalled}


_Job = tuple[Future[Any], Callable[[], Any]]


def _serve(inbox: SimpleQueue[_Job | None]) -> None:
    while (job := inbox.get()) is not None:
        future, work = job
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)


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

    def close(self) -> dict[Worker, Thread]:
        self._turns.clear()
        return {}
