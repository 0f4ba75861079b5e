"""Workers: a slot engine each, on devices of its own with a thread of its own, or in turn with the others.

A worker does what the scheduler's commands say and reports what its rows have become. A driver lets several of them
run: `Threads` side by side, `Turns` by one thread, in an order that does not depend on how long anything takes.
"""

from __future__ import annotations

import functools
import logging
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

from app.mesh.placement import shardings_of
from app.model.kv_cache import Cache, DecodeWeights
from app.rollout.counters import Tally
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import Kind, RowReport, RunSegment, SegmentEnded
from app.rollout.sequence import Row, Suspended
from app.rollout.slot_engine import SlotEngine

log = logging.getLogger(__name__)

LAST_SEGMENT_S = 600.0
"""How long the end of a rollout waits for whatever still runs, at most: nobody needs it any more."""

Clock = Callable[[], float]
"""Seconds from any moment on."""


class Admission(NamedTuple):
    """A row that comes into a worker."""

    row: Row
    uid: str
    epoch: int
    """As the scheduler knows it."""
    kept: Future[Suspended] | None
    """Where its cache comes from; None, or one that failed: it is computed from the row."""


@dataclass(eq=False)
class Worker:
    """Slots that a scheduler commands. One thread at a time."""

    name: str
    kind: Kind
    engine: SlotEngine
    device: str | None = None
    """Workers with the same one take turns on it; None: devices of its own."""
    patience_s: float | None = None
    """How long it waits for a cache that another worker should have kept; None: any time."""
    clock: Clock = time.perf_counter
    _known_as: dict[Row, Admission] = field(default_factory=dict)
    """Rows in its slots -> how they came."""
    _running: tuple[RunSegment, float] | None = None
    """The segment, and when it was started."""
    _offered: deque[tuple[DecodeWeights, int]] = field(default_factory=lambda: deque(maxlen=1))
    """The newest weights that it has not loaded yet, on its devices, and their version. From another thread."""
    _tallies: deque[Tally] = field(default_factory=deque)
    """Of its segments."""

    def open(
        self, weights: DecodeWeights, *, rules: SamplingRules, seed: int, policy_version: int, suspends: bool
    ) -> None:
        """Empty slots, and the weights on the worker's devices; see `SlotEngine.open`."""
        self._offered.clear()
        placed = self._placed(weights)
        # They may still be computed, by an update: no lease is to run while they are.
        jax.block_until_ready(placed)
        self.engine.open(placed, rules=rules, seed=seed, policy_version=policy_version, suspends=suspends)

    @property
    def num_devices(self) -> int:
        return len(jax.tree.leaves(self.engine.programs.abstract_weights)[0].sharding.device_set)

    def _placed(self, weights: DecodeWeights) -> DecodeWeights:
        return jax.device_put(weights, shardings_of(self.engine.programs.abstract_weights))

    def offer(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Its next segment is drawn by these weights; rows go on with the caches they have. From any thread.

        One thread offers the same weights to all workers: an array that several threads place at once is seen by some
        of them while JAX still lists its shards (jax 0.10.2).
        """
        if self.engine.is_open:
            self._offered.append((self._placed(weights), policy_version))
            # Closed meanwhile, by another thread: nothing may stay on its devices.
            if not self.engine.is_open:
                self._offered.clear()

    def take_tally(self) -> Tally:
        """Of all segments that have ended since the last call. From any thread."""
        return Tally.sum([Tally(), *(self._tallies.popleft() for _ in range(len(self._tallies)))])

    def close(self) -> None:
        self._known_as, self._running = {}, None
        self._offered.clear()
        self.engine.close()

    def suspend(self, row: Row) -> Suspended:
        """Takes it out, with its cache."""
        del self._known_as[row]
        return self.engine.suspend([row])[0]

    def begin(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Admits rows and sets the segment going. Empties the queue: who holds it holds the caches no longer."""
        started = self.clock()
        if self._offered:
            weights, version = self._offered.pop()
            self.engine.load(weights, policy_version=version)
        computed = []
        while admissions:
            one = admissions.popleft()
            self._known_as[one.row] = one._replace(kept=None)
            cache = self._cache_of(one)
            if cache is None:
                computed.append(Suspended(one.row, None) if one.row.num_tokens else one.row)
            else:
                # One by one: together the copies would be as large as all slots.
                self.engine.admit([Suspended(one.row, cache)])
                del cache
        self.engine.admit(computed)
        if not command.leave_when_finished:
            self.engine.compact()
        self.engine.start(
            length=command.length,
            leave_when_finished=command.leave_when_finished,
            leave_when_active=command.leave_when_active,
        )
        self._running = command, started

    def _cache_of(self, one: Admission) -> Cache | None:
        """On this worker's devices."""
        if one.kept is None:
            return None
        try:
            kept = one.kept.result(self.patience_s).cache
        except Exception as error:
            log.warning("rollout worker %s computes the cache of %s anew", self.name, one.uid, exc_info=error)
            return None
        shapes = self.engine.programs.abstract_cache(1, self.engine.shapes.max_length)
        return jax.device_put(kept, shardings_of(shapes))

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
        self._tallies.append(self.engine.tally.take())
        at = self.clock()
        reports = []
        for _, row, _ in segment.ran:
            known, row.worker = self._known_as[row], self.name
            reports.append(RowReport(known.uid, known.epoch, row.num_tokens, row.finish_reason))
            if row.finish_reason is not None:
                del self._known_as[row]
        seconds = at - max(started, not_before)
        return SegmentEnded(at, self.name, command.segment, tuple(reports), seconds, segment.steps)


class SilentError(RuntimeError):
    """A worker has said nothing for as long as its lease; what it does is not known."""


class Outcome(NamedTuple):
    """What a worker has to say: a segment has ended, or it has failed."""

    worker: Worker
    said: SegmentEnded | BaseException


class Driver(Protocol):
    """Lets workers do what they are told. One that has failed does nothing more, and says so once."""

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]: ...

    def run(self, worker: Worker, command: RunSegment, admissions: deque[Admission]) -> None: ...

    def next(self) -> Outcome | None:
        """Waits for the next worker that has something to say. None: it was woken before."""
        ...

    def wake(self) -> None:
        """Ends the wait of `next`, or the next one. From any thread."""
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
        self._outcomes: SimpleQueue[Outcome | None] = SimpleQueue()
        self._due: dict[Worker, float] = {}
        """When the lease of a worker that is in a segment ends, of `time.monotonic`."""
        self._stalled: set[Worker] = set()
        # Daemons: one that never comes back must not keep the program from ending.
        self._threads = {
            worker: Thread(target=self._serve, args=(worker,), name=worker.name, daemon=True) for worker in workers
        }
        for worker in workers if lease_s is not None else ():
            worker.engine.when_fed = functools.partial(self._renew, worker)
        for thread in self._threads.values():
            thread.start()

    def _renew(self, worker: Worker) -> None:
        """It is alive: a token that it computes again has come from the devices."""
        assert self._lease_s is not None
        if worker in self._due:
            self._due[worker] = time.monotonic() + self._lease_s

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]:
        return self._ask(worker, lambda: worker.suspend(row))

    def run(self, worker: Worker, command: RunSegment, admissions: deque[Admission]) -> None:
        def segment() -> None:
            worker.begin(command, admissions)
            self._outcomes.put(Outcome(worker, worker.end()))

        self._due[worker] = time.monotonic() + (math.inf if self._lease_s is None else self._lease_s)
        self._ask(worker, segment)

    def _ask(self, worker: Worker, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._inboxes[worker].put((future, work))
        return future

    def _serve(self, worker: Worker) -> None:
        inbox = self._inboxes[worker]
        failure: BaseException | None = None
        while (job := inbox.get()) is not None:
            future, work = job
            try:
                # Its slots are in no known state: what was asked before it was known to have failed is refused.
                if failure is not None:
                    raise RuntimeError(f"{worker.name} has failed") from failure
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if failure is None:
                    failure = error
                    self._outcomes.put(Outcome(worker, error))
            # What they hold, caches among it, is not to wait for the next job.
            del job, future, work

    def wake(self) -> None:
        self._outcomes.put(None)

    def next(self) -> Outcome | None:
        try:
            outcome = self._outcomes.get(timeout=self._until_due())
        except Empty:
            if self._until_due():
                # Its lease was renewed meanwhile.
                return None
            late = min(self._due, key=lambda worker: self._due[worker])
            outcome = Outcome(late, SilentError(f"silent for {self._lease_s} s"))
            self._stalled.add(late)
        if outcome is not None:
            self._due.pop(outcome.worker, None)
        return outcome

    def _until_due(self) -> float | None:
        """Seconds until the first lease ends; None: none does."""
        due = min(self._due.values(), default=math.inf)
        return None if due == math.inf else max(due - time.monotonic(), 0.0)

    def close(self) -> dict[Worker, Thread]:
        for inbox in self._inboxes.values():
            inbox.put(None)
        for worker in self._threads.keys() - self._stalled:
            due = min(self._due.get(worker, math.inf) - time.monotonic(), LAST_SEGMENT_S)
            self._threads[worker].join(max(due, 0.0))
        left = {worker: thread for worker, thread in self._threads.items() if thread.is_alive()}
        for worker in left:
            log.warning("rollout worker %s is left in a segment that does not end", worker.name)
        return left


_Job = tuple[Future[Any], Callable[[], Any]]


class Turns:
    """One thread for all workers. Segments are heard in the order in which they were started.

    The devices are busy with the next segments meanwhile, whether the workers share them or not.
    """

    def __init__(self) -> None:
        self._turns: deque[tuple[Worker, Exception | None]] = deque()
        self._failed: set[Worker] = set()
        self._free_at: dict[str, float] = {}
        """Device that is shared -> when its last segment ended."""

    def suspend(self, worker: Worker, row: Row) -> Future[Suspended]:
        future: Future[Suspended] = Future()
        try:
            future.set_result(worker.suspend(row))
        except Exception as error:
            future.set_exception(error)
            self._fail(worker, error)
        return future

    def run(self, worker: Worker, command: RunSegment, admissions: deque[Admission]) -> None:
        if worker in self._failed:
            return
        try:
            worker.begin(command, admissions)
            self._turns.append((worker, None))
        except Exception as error:
            self._fail(worker, error)

    def _fail(self, worker: Worker, error: Exception) -> None:
        if worker not in self._failed:
            self._failed.add(worker)
            self._turns.append((worker, error))

    def wake(self) -> None:
        """It waits for no other thread."""

    def next(self) -> Outcome:
        worker, failure = self._turns.popleft()
        if failure is not None:
            return Outcome(worker, failure)
        device = worker.device or worker.name
        try:
            ended = worker.end(not_before=self._free_at.get(device, 0.0))
        except Exception as error:
            self._failed.add(worker)
            return Outcome(worker, error)
        self._free_at[device] = ended.at
        return Outcome(worker, ended)

    def close(self) -> dict[Worker, Thread]:
        self._turns.clear()
        return {}
