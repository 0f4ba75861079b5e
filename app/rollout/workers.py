"""Rollout workers, each with a slot engine, and the drivers that run several of them.

A worker carries out the scheduler's commands and reports the progress of its rows. `ThreadedDriver` runs workers in
parallel; `SequentialDriver` runs them in one thread, in an order that does not depend on measured times.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import jax

from app.mesh.placement import tree_shardings
from app.model.kv_cache import DecodeWeights, KVCache
from app.rollout.counters import RolloutCounters
from app.rollout.request import GenerationRequest
from app.rollout.scheduling.events import RowReport, RunSegment, SegmentEnded, WorkerKind
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.slot_engine import SlotEngine

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 600.0
"""Longest time that the end of a rollout waits for segments that still run."""

Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""


class Admission(NamedTuple):
    """A row that is admitted to a worker."""

    row: RolloutSequence
    uid: str
    epoch: int
    """Number of its admission, as in `Admit`."""
    suspended: Future[SuspendedSequence] | None
    """Its cache; without one, or if the future fails, the cache is computed from the row."""


@dataclass(eq=False)
class RolloutWorker:
    """Slots that a scheduler controls. Used by one thread at a time."""

    name: str
    kind: WorkerKind
    engine: SlotEngine
    device: str | None = None
    """Name of a device that it shares with other workers; None if its devices are its own."""
    cache_timeout_s: float | None = None
    """Longest time that it waits for the cache of a row from another worker; None: no limit."""
    clock: Clock = time.perf_counter
    _admissions: dict[RolloutSequence, Admission] = field(default_factory=dict)
    """Maps rows in its slots to their admissions."""
    _running: tuple[RunSegment, float] | None = None
    """The running segment and its start."""
    _queued_weights: deque[tuple[DecodeWeights, int]] = field(default_factory=lambda: deque(maxlen=1))
    """The newest weights that are not loaded yet, on its devices, and their version. Set by another thread."""
    _segment_counters: deque[RolloutCounters] = field(default_factory=deque)
    """Counts of its segments since `take_counters`."""

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool) -> None:
        """Puts the weights on the worker's devices and starts with empty slots; see `SlotEngine.open`."""
        self._queued_weights.clear()
        placed = self._place_weights(weights)
        # An update may still be computing them, and no lease may run meanwhile.
        jax.block_until_ready(placed)
        self.engine.open(placed, request, suspends=suspends)

    @property
    def num_devices(self) -> int:
        return len(jax.tree.leaves(self.engine.programs.abstract_weights)[0].sharding.device_set)

    def _place_weights(self, weights: DecodeWeights) -> DecodeWeights:
        return jax.device_put(weights, tree_shardings(self.engine.programs.abstract_weights))

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Queues weights for its next segment; rows keep their caches. From any thread.

        One thread passes the same weights to all workers: when several threads place an array at once, some of them
        see it while JAX still lists its shards (jax 0.10.2).
        """
        if self.engine.is_open:
            self._queued_weights.append((self._place_weights(weights), policy_version))
            # If another thread has closed it meanwhile, nothing may stay on its devices.
            if not self.engine.is_open:
                self._queued_weights.clear()

    def take_counters(self) -> RolloutCounters:
        """Returns the counts of the segments that ended since the last call. From any thread."""
        return RolloutCounters.sum(
            [RolloutCounters(), *(self._segment_counters.popleft() for _ in range(len(self._segment_counters)))]
        )

    def close(self) -> None:
        self._admissions, self._running = {}, None
        self._queued_weights.clear()
        self.engine.close()

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes a row out of its slot, with its cache."""
        del self._admissions[row]
        return self.engine.suspend([row])[0]

    def start_segment(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Admits rows and dispatches the segment. Empties the queue, so that it does not keep caches alive."""
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
                # One at a time, because all copies together would be as large as all slots.
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
        """Returns a row's cache on this worker's devices, if there is one."""
        if one.suspended is None:
            return None
        try:
            cache = one.suspended.result(self.cache_timeout_s).cache
        except Exception as error:
            log.warning("rollout worker %s recomputes the cache of %s", self.name, one.uid, exc_info=error)
            return None
        shapes = self.engine.programs.abstract_cache(1, self.engine.shapes.max_length)
        return jax.device_put(cache, tree_shardings(shapes))

    def finish_segment(self, *, not_before: float = 0.0) -> SegmentEnded:
        """Waits for the segment and collects its tokens.

        Args:
            not_before: earliest start of the segment, because another worker used the devices until then.
        """
        assert self._running is not None
        (command, started), self._running = self._running, None
        segment = self.engine.finish_segment()
        # Collected before it is reported, because committed tokens must survive a failure of the worker.
        segment.collect()
        self._segment_counters.append(self.engine.counters.take())
        at = self.clock()
        reports = []
        for _, row, _ in segment.decoded:
            admission, row.worker = self._admissions[row], self.name
            reports.append(RowReport(admission.uid, admission.epoch, row.num_tokens, row.finish_reason))
            if row.finish_reason is not None:
                del self._admissions[row]
        seconds = at - max(started, not_before)
        return SegmentEnded(at, self.name, command.segment, tuple(reports), seconds, segment.steps)


class LeaseExpiredError(RuntimeError):
    """A worker has not finished its segment within its lease; its state is unknown."""


class WorkerOutcome(NamedTuple):
    """The outcome of a worker's command: a segment that ended, or the worker's failure."""

    worker: RolloutWorker
    result: SegmentEnded | BaseException


class ThreadedDriver:
    """One thread per worker. Outcomes are reported in the order in which they arrive.

    A failed worker runs no more commands, and its failure is reported once.

    Args:
        lease_s: longest time of a segment until its worker counts as failed; None: no limit.
    """

    def __init__(self, workers: Sequence[RolloutWorker], *, lease_s: float | None):
        self._lease_s = lease_s
        self._inboxes: dict[RolloutWorker, SimpleQueue[_Job | None]] = {worker: SimpleQueue() for worker in workers}
        self._outcomes: SimpleQueue[WorkerOutcome | None] = SimpleQueue()
        self._lease_ends: dict[RolloutWorker, float] = {}
        """End of the lease of each worker in a segment, of `time.monotonic`."""
        self._stalled: set[RolloutWorker] = set()
        # Daemon threads, because a thread that never returns must not keep the program alive.
        self._threads = {
            worker: Thread(target=self._run_thread, args=(worker,), name=worker.name, daemon=True) for worker in workers
        }
        for worker in workers if lease_s is not None else ():
            worker.engine.on_token_replayed = functools.partial(self._renew_lease, worker)
        for thread in self._threads.values():
            thread.start()

    def _renew_lease(self, worker: RolloutWorker) -> None:
        """Extends the lease, because the worker has just replayed a token."""
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
                # The state of its slots is unknown, so jobs queued before the failure was known are refused.
                if failure is not None:
                    raise RuntimeError(f"{worker.name} has failed") from failure
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if failure is None:
                    failure = error
                    self._outcomes.put(WorkerOutcome(worker, error))
            # They refer to caches, which must not be kept alive until the next job.
            del job, future, work

    def wake(self) -> None:
        """Ends the current or next wait of `next_outcome`. From any thread."""
        self._outcomes.put(None)

    def next_outcome(self) -> WorkerOutcome | None:
        """Waits for the next outcome. Returns None if it was woken first."""
        try:
            outcome = self._outcomes.get(timeout=self._seconds_until_due())
        except Empty:
            if self._seconds_until_due():
                # The lease was extended meanwhile.
                return None
            late = min(self._lease_ends, key=lambda worker: self._lease_ends[worker])
            outcome = WorkerOutcome(late, LeaseExpiredError(f"silent for {self._lease_s} s"))
            self._stalled.add(late)
        if outcome is not None:
            self._lease_ends.pop(outcome.worker, None)
        return outcome

    def _seconds_until_due(self) -> float | None:
        """Returns the seconds until the first lease ends; None without one."""
        due = min(self._lease_ends.values(), default=math.inf)
        return None if due == math.inf else max(due - time.monotonic(), 0.0)

    def close(self) -> dict[RolloutWorker, Thread]:
        """Waits for all workers except stalled ones; returns those that still run, with their threads."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for worker in self._threads.keys() - self._stalled:
            due = min(self._lease_ends.get(worker, math.inf) - time.monotonic(), CLOSE_TIMEOUT_S)
            self._threads[worker].join(max(due, 0.0))
        running = {worker: thread for worker, thread in self._threads.items() if thread.is_alive()}
        for worker in running:
            log.warning("rollout worker %s is still in a segment that does not end; it is abandoned", worker.name)
        return running


_Job = tuple[Future[Any], Callable[[], Any]]


class SequentialDriver:
    """One thread for all workers, with the interface of `ThreadedDriver`.

    Segments are reported in the order of their start. The devices run the next segments meanwhile, whether the workers
    share them or not.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[RolloutWorker, Exception | None]] = deque()
        self._failed: set[RolloutWorker] = set()
        self._device_free_at: dict[str, float] = {}
        """Maps a shared device to the end of its last segment."""

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
        """Does nothing, because it never waits for another thread."""

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


WorkerDriver = ThreadedDriver | SequentialDriver
