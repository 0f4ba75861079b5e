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

from app.mesh.placement import tree_shardings
from app.model.kv_cache import DecodeWeights, KVCache
from app.rollout.counters import RolloutCounters
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import RowReport, RunSegment, SegmentEnded, WorkerKind
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.slot_engine import SlotEngine

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 600.0
"""How long the end of a rollout waits for whatever still runs, at most: nobody needs it any more."""

Clock = Callable[[], float]
"""Seconds from any moment on."""


class Admission(NamedTuple):
    """A row that comes into a worker."""

    row: RolloutSequence
    uid: str
    epoch: int
    """As the scheduler knows it."""
    suspended: Future[SuspendedSequence] | None
    """Where its cache comes from; None, or one that failed: it is computed from the row."""


@dataclass(eq=False)
class RolloutWorker:
    """Slots that a scheduler commands. One thread at a time."""

    name: str
    kind: WorkerKind
    engine: SlotEngine
    device: str | None = None
    """Workers with the same one take turns on it; None: devices of its own."""
    cache_timeout_s: float | None = None
    """How long it waits for a cache that another worker should have kept; None: any time."""
    clock: Clock = time.perf_counter
    _admissions: dict[RolloutSequence, Admission] = field(default_factory=dict)
    """Rows in its slots -> how they came."""
    _running: tuple[RunSegment, float] | None = None
    """The segment, and when it was started."""
    _queued_weights: deque[tuple[DecodeWeights, int]] = field(default_factory=lambda: deque(maxlen=1))
    """The newest weights that it has not loaded yet, on its devices, and their version. From another thread."""
    _segment_counters: deque[RolloutCounters] = field(default_factory=deque)
    """Of its segments."""

    def open(
        self, weights: DecodeWeights, *, rules: SamplingRules, seed: int, policy_version: int, suspends: bool
    ) -> None:
        """Empty slots, and the weights on the worker's devices; see `SlotEngine.open`."""
        self._queued_weights.clear()
        placed = self._place_weights(weights)
        # They may still be computed, by an update: no lease is to run while they are.
        jax.block_until_ready(placed)
        self.engine.open(placed, rules=rules, seed=seed, policy_version=policy_version, suspends=suspends)

    @property
    def num_devices(self) -> int:
        return len(jax.tree.leaves(self.engine.programs.abstract_weights)[0].sharding.device_set)

    def _place_weights(self, weights: DecodeWeights) -> DecodeWeights:
        return jax.device_put(weights, tree_shardings(self.engine.programs.abstract_weights))

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Its next segment is drawn by these weights; rows go on with the caches they have. From any thread.

        One thread offers the same weights to all workers: an array that several threads place at once is seen by some
        of them while JAX still lists its shards (jax 0.10.2).
        """
        if self.engine.is_open:
            self._queued_weights.append((self._place_weights(weights), policy_version))
            # Closed meanwhile, by another thread: nothing may stay on its devices.
            if not self.engine.is_open:
                self._queued_weights.clear()

    def take_counters(self) -> RolloutCounters:
        """Of all segments that have ended since the last call. From any thread."""
        return RolloutCounters.sum(
            [RolloutCounters(), *(self._segment_counters.popleft() for _ in range(len(self._segment_counters)))]
        )

    def close(self) -> None:
        self._admissions, self._running = {}, None
        self._queued_weights.clear()
        self.engine.close()

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes it out, with its cache."""
        del self._admissions[row]
        return self.engine.suspend([row])[0]

    def start_segment(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Admits rows and sets the segment going. Empties the queue: who holds it holds the caches no longer."""
        started = self.clock()
        if self._queued_weights:
            weights, version = self._queued_weights.pop()
            self.engine.load_weights(weights, policy_version=version)
        computed = []
        while admissions:
            one = admissions.popleft()
            self._admissions[one.row] = one._replace(suspended=None)
            cache = self._fetch_cache(one)
            if cache is None:
                computed.append(SuspendedSequence(one.row, None) if one.row.num_tokens else one.row)
            else:
                # One by one: together the copies would be as large as all slots.
                self.engine.admit([SuspendedSequence(one.row, cache)])
                del cache
        self.engine.admit(computed)
        if not command.leave_when_finished:
            self.engine.compact()
        self.engine.start_segment(
            length=command.length,
            leave_when_finished=command.leave_when_finished,
            leave_when_active=command.leave_when_active,
        )
        self._running = command, started

    def _fetch_cache(self, one: Admission) -> KVCache | None:
        """On this worker's devices."""
        if one.suspended is None:
            return None
        try:
            kept = one.suspended.result(self.cache_timeout_s).cache
        except Exception as error:
            log.warning("rollout worker %s computes the cache of %s anew", self.name, one.uid, exc_info=error)
            return None
        shapes = self.engine.programs.abstract_cache(1, self.engine.shapes.max_length)
        return jax.device_put(kept, tree_shardings(shapes))

    def finish_segment(self, *, not_before: float = 0.0) -> SegmentEnded:
        """Waits for the segment; its tokens have come from the devices, too.

        Args:
            not_before: when the segment could begin at the earliest, because another had the devices.
        """
        assert self._running is not None
        (command, started), self._running = self._running, None
        segment = self.engine.finish_segment()
        # Before it is reported: what is committed must be there, whatever becomes of the worker.
        segment.collect()
        self._segment_counters.append(self.engine.counters.take())
        at = self.clock()
        reports = []
        for _, row, _ in segment.decoded:
            known, row.worker = self._admissions[row], self.name
            reports.append(RowReport(known.uid, known.epoch, row.num_tokens, row.finish_reason))
            if row.finish_reason is not None:
                del self._admissions[row]
        seconds = at - max(started, not_before)
        return SegmentEnded(at, self.name, command.segment, tuple(reports), seconds, segment.steps)


class LeaseExpiredError(RuntimeError):
    """A worker has said nothing for as long as its lease; what it does is not known."""


class WorkerOutcome(NamedTuple):
    """What a worker has to say: a segment has ended, or it has failed."""

    worker: RolloutWorker
    result: SegmentEnded | BaseException


class WorkerDriver(Protocol):
    """Lets workers do what they are told. One that has failed does nothing more, and says so once."""

    def suspend(self, worker: RolloutWorker, row: RolloutSequence) -> Future[SuspendedSequence]: ...

    def run_segment(self, worker: RolloutWorker, command: RunSegment, admissions: deque[Admission]) -> None: ...

    def next_outcome(self) -> WorkerOutcome | None:
        """Waits for the next worker that has something to say. None: it was woken before."""
        ...

    def wake(self) -> None:
        """Ends the wait of `next`, or the next one. From any thread."""
        ...

    def close(self) -> Mapping[RolloutWorker, Thread]:
        """Waits for whatever still runs, but for workers that have stalled. Returns these."""
        ...


class ThreadedDriver:
    """A thread for each worker. Whoever is done first is heard first.

    Args:
        lease_s: how long a worker may be silent in a segment until it counts as failed; None: any time.
    """

    def __init__(self, workers: Sequence[RolloutWorker], *, lease_s: float | None):
        self._lease_s = lease_s
        self._inboxes: dict[RolloutWorker, SimpleQueue[_Job | None]] = {worker: SimpleQueue() for worker in workers}
        self._outcomes: SimpleQueue[WorkerOutcome | None] = SimpleQueue()
        self._lease_ends: dict[RolloutWorker, float] = {}
        """When the lease of a worker that is in a segment ends, of `time.monotonic`."""
        self._stalled: set[RolloutWorker] = set()
        # Daemons: one that never comes back must not keep the program from ending.
        self._threads = {
            worker: Thread(target=self._run_thread, args=(worker,), name=worker.name, daemon=True) for worker in workers
        }
        for worker in workers if lease_s is not None else ():
            worker.engine.on_token_replayed = functools.partial(self._renew_lease, worker)
        for thread in self._threads.values():
            thread.start()

    def _renew_lease(self, worker: RolloutWorker) -> None:
        """It is alive: a token that it computes again has come from the devices."""
        assert self._lease_s is not None
        if worker in self._lease_ends:
            self._lease_ends[worker] = time.monotonic() + self._lease_s

    def suspend(self, worker: RolloutWorker, row: RolloutSequence) -> Future[SuspendedSequence]:
        return self._enqueue(worker, lambda: worker.suspend(row))

    def run_segment(self, worker: RolloutWorker, command: RunSegment, admissions: deque[Admission]) -> None:
        def segment() -> None:
            worker.start_segment(command, admissions)
            self._outcomes.put(WorkerOutcome(worker, worker.finish_segment()))

        self._lease_ends[worker] = time.monotonic() + (math.inf if self._lease_s is None else self._lease_s)
        self._enqueue(worker, segment)

    def _enqueue(self, worker: RolloutWorker, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._inboxes[worker].put((future, function))
        return future

    def _run_thread(self, worker: RolloutWorker) -> None:
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
                    self._outcomes.put(WorkerOutcome(worker, error))
            # What they hold, caches among it, is not to wait for the next job.
            del job, future, work

    def wake(self) -> None:
        self._outcomes.put(None)

    def next_outcome(self) -> WorkerOutcome | None:
        try:
            outcome = self._outcomes.get(timeout=self._seconds_until_due())
        except Empty:
            if self._seconds_until_due():
                # Its lease was renewed meanwhile.
                return None
            late = min(self._lease_ends, key=lambda worker: self._lease_ends[worker])
            outcome = WorkerOutcome(late, LeaseExpiredError(f"silent for {self._lease_s} s"))
            self._stalled.add(late)
        if outcome is not None:
            self._lease_ends.pop(outcome.worker, None)
        return outcome

    def _seconds_until_due(self) -> float | None:
        """Seconds until the first lease ends; None: none does."""
        due = min(self._lease_ends.values(), default=math.inf)
        return None if due == math.inf else max(due - time.monotonic(), 0.0)

    def close(self) -> dict[RolloutWorker, Thread]:
        for inbox in self._inboxes.values():
            inbox.put(None)
        for worker in self._threads.keys() - self._stalled:
            due = min(self._lease_ends.get(worker, math.inf) - time.monotonic(), CLOSE_TIMEOUT_S)
            self._threads[worker].join(max(due, 0.0))
        left = {worker: thread for worker, thread in self._threads.items() if thread.is_alive()}
        for worker in left:
            log.warning("rollout worker %s is left in a segment that does not end", worker.name)
        return left


_Job = tuple[Future[Any], Callable[[], Any]]


class SequentialDriver:
    """One thread for all workers. Segments are heard in the order in which they were started.

    The devices are busy with the next segments meanwhile, whether the workers share them or not.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[RolloutWorker, Exception | None]] = deque()
        self._failed: set[RolloutWorker] = set()
        self._device_free_at: dict[str, float] = {}
        """Device that is shared -> when its last segment ended."""

    def suspend(self, worker: RolloutWorker, row: RolloutSequence) -> Future[SuspendedSequence]:
        future: Future[SuspendedSequence] = Future()
        try:
            future.set_result(worker.suspend(row))
        except Exception as error:
            future.set_exception(error)
            self._fail(worker, error)
        return future

    def run_segment(self, worker: RolloutWorker, command: RunSegment, admissions: deque[Admission]) -> None:
        if worker in self._failed:
            return
        try:
            worker.start_segment(command, admissions)
            self._started.append((worker, None))
        except Exception as error:
            self._fail(worker, error)

    def _fail(self, worker: RolloutWorker, error: Exception) -> None:
        if worker not in self._failed:
            self._failed.add(worker)
            self._started.append((worker, error))

    def wake(self) -> None:
        """It waits for no other thread."""

    def next_outcome(self) -> WorkerOutcome:
        worker, failure = self._started.popleft()
        if failure is not None:
            return WorkerOutcome(worker, failure)
        device = worker.device or worker.name
        try:
            ended = worker.finish_segment(not_before=self._device_free_at.get(device, 0.0))
        except Exception as error:
            self._failed.add(worker)
            return WorkerOutcome(worker, error)
        self._device_free_at[device] = ended.at
        return WorkerOutcome(worker, ended)

    def close(self) -> dict[RolloutWorker, Thread]:
        self._started.clear()
        return {}
