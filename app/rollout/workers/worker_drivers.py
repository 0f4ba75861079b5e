"""Drivers that run several rollout workers.

`ThreadedDriver` runs them in parallel; `SequentialDriver` runs them in one thread, in an order that does not depend on
measured times.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

from app.rollout.scheduling.protocol import RunSegment, SegmentEnded
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import Admission, RolloutWorker

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 600.0
"""Maximum wait for running segments at the end of a rollout."""


class LeaseExpiredError(RuntimeError):
    """A worker did not finish its segment within its lease; its state is unknown."""


class WorkerOutcome(NamedTuple):
    """Outcome of a worker's command: the end of a segment, or the worker's failure."""

    worker: RolloutWorker
    result: SegmentEnded | BaseException


class ThreadedDriver:
    """Runs each worker in its own thread. Outcomes are reported in the order in which they arrive.

    A failed worker runs no more commands, and its failure is reported once.

    Args:
        lease_s: maximum duration of a segment, after which its worker counts as failed; None = no limit.
    """

    def __init__(self, workers: Sequence[RolloutWorker], *, lease_s: float | None):
        self._lease_s = lease_s
        self._inboxes: dict[RolloutWorker, SimpleQueue[_Job | None]] = {}
        self._threads: dict[RolloutWorker, Thread] = {}
        self._outcomes: SimpleQueue[WorkerOutcome | None] = SimpleQueue()
        self._lease_ends: dict[RolloutWorker, float] = {}
        """End of the lease of each worker that runs a segment, by `time.monotonic`."""
        self._stalled: set[RolloutWorker] = set()
        for worker in workers:
            self.add(worker)

    def add(self, worker: RolloutWorker) -> None:
        """Starts the thread of a worker: a new one for a worker that had failed and whose thread has no job."""
        if worker in self._inboxes:
            self._inboxes[worker].put(None)
            self._stalled.discard(worker)
        inbox = self._inboxes[worker] = SimpleQueue()
        # A daemon thread, because one that never returns must not keep the program alive.
        thread = self._threads[worker] = Thread(
            target=self._run_thread, args=(worker, inbox), name=worker.name, daemon=True
        )
        thread.start()

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

    def _run_thread(self, worker: RolloutWorker, inbox: SimpleQueue[_Job | None]) -> None:
        failure: BaseException | None = None
        while (job := inbox.get()) is not None:
            future, work = job
            try:
                # After a failure the state of the slots is unknown, so jobs that are already queued are refused.
                if failure is not None:
                    raise RuntimeError(f"{worker.name} has failed") from failure
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                if failure is None:
                    failure = error
                    self._outcomes.put(WorkerOutcome(worker, error))
            # These variables refer to caches, which must not be kept alive until the next job.
            del job, future, work

    def wake(self) -> None:
        """Ends the current or next wait of `next_outcome`. May be called from any thread."""
        self._outcomes.put(None)

    def next_outcome(self) -> WorkerOutcome | None:
        """Waits for the next outcome. Returns None after `wake`."""
        try:
            outcome = self._outcomes.get(timeout=self._seconds_until_due())
        except Empty:
            late = min(self._lease_ends, key=lambda worker: self._lease_ends[worker])
            del self._lease_ends[late]
            self._stalled.add(late)
            return WorkerOutcome(late, LeaseExpiredError(f"silent for {self._lease_s} s"))
        if outcome is not None:
            self._lease_ends.pop(outcome.worker, None)
            self._stalled.discard(outcome.worker)
        return outcome

    def _seconds_until_due(self) -> float | None:
        """Returns the seconds until the first lease ends; None if no lease ends."""
        due = min(self._lease_ends.values(), default=math.inf)
        return None if due == math.inf else max(due - time.monotonic(), 0.0)

    def close(self) -> dict[RolloutWorker, Thread]:
        """Waits for all workers except stalled ones; returns those still running, with their threads."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for worker in self._threads.keys() - self._stalled:
            due = min(self._lease_ends.get(worker, math.inf) - time.monotonic(), CLOSE_TIMEOUT_S)
            self._threads[worker].join(max(due, 0.0))
        running = {worker: thread for worker, thread in self._threads.items() if thread.is_alive()}
        for worker in running:
            log.warning("rollout worker %s is stuck in a segment and is abandoned", worker.name)
        return running


_Job = tuple[Future[Any], Callable[[], Any]]


class SequentialDriver:
    """Runs all workers in one thread, with the interface of `ThreadedDriver`.

    Segments are reported in the order in which they started. Meanwhile the devices run the next segments, whether or
    not workers share them.
    """

    def __init__(self) -> None:
        self._started: deque[tuple[RolloutWorker, Exception | None]] = deque()
        self._failed: set[RolloutWorker] = set()
        self._device_free_at: dict[str, float] = {}
        """Maps a device to the end of its last segment."""

    def add(self, worker: RolloutWorker) -> None:
        """Lets a worker that had failed run commands again."""
        self._failed.discard(worker)

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
        """Does nothing, because this driver never waits for another thread."""

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
