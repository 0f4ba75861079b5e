"""Threads that run the segments of rollout workers, one thread per worker."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import SimpleQueue
from threading import Thread
from typing import Any

from app.rollout.scheduling.protocol import RunSegment, SegmentEnded
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import Admission, RolloutWorker

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 600.0
"""Maximum wait, in seconds, for a running segment at the end of a rollout."""


WorkerOutcome = tuple[RolloutWorker, SegmentEnded | BaseException]
"""(worker, its finished segment or the error that it raised)."""


class WorkerThreads:
    """Runs each worker in its own thread. On a shared device, the segments of several workers take turns.

    Args:
        in_order: whether segments are reported in start order instead of end order, so that a repeated rollout has the
            same schedule.
    """

    def __init__(self, workers: Sequence[RolloutWorker], *, in_order: bool):
        self._in_order = in_order
        self._started: deque[RolloutWorker] = deque()
        """Workers whose segments are not reported yet, in start order."""
        self._ended: dict[RolloutWorker, SegmentEnded] = {}
        """Worker in `_started` -> its segment, if the segment has ended."""
        self._outcomes: SimpleQueue[WorkerOutcome | None] = SimpleQueue()
        self._device_free_at: dict[str, float] = {}
        """Shared device -> end time of its last reported segment."""
        self._inboxes: dict[RolloutWorker, SimpleQueue[_Job | None]] = {worker: SimpleQueue() for worker in workers}
        # Daemon threads, because a device call that never returns must not keep a failed program alive.
        self._threads = [
            Thread(target=self._run, args=(worker, inbox), name=worker.name, daemon=True)
            for worker, inbox in self._inboxes.items()
        ]
        for thread in self._threads:
            thread.start()

    def suspend(self, worker: RolloutWorker, row: RolloutSequence) -> Future[SuspendedSequence]:
        return self._enqueue(worker, lambda: worker.suspend(row))

    def run_segment(self, worker: RolloutWorker, command: RunSegment, admissions: deque[Admission]) -> None:
        def segment() -> None:
            worker.start_segment(command, admissions)
            self._outcomes.put((worker, worker.finish_segment()))

        self._started.append(worker)
        self._enqueue(worker, segment)

    def _enqueue(self, worker: RolloutWorker, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._inboxes[worker].put((future, function))
        return future

    def _run(self, worker: RolloutWorker, inbox: SimpleQueue[_Job | None]) -> None:
        while (job := inbox.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
                self._outcomes.put((worker, error))
            # These variables refer to caches, and would keep them alive until the next job.
            del job, future, work

    def wake(self) -> None:
        """Ends the current or next wait of `next_outcome`. May be called from any thread."""
        self._outcomes.put(None)

    def next_outcome(self) -> WorkerOutcome | None:
        """Waits for the next outcome; returns None after `wake`. Errors are returned at once, even with `in_order`."""
        while not self._ended or (self._in_order and self._started[0] not in self._ended):
            outcome = self._outcomes.get()
            if outcome is None:
                return None
            worker, result = outcome
            if isinstance(result, BaseException):
                if worker in self._started:
                    self._started.remove(worker)
                return outcome
            self._ended[worker] = result
        worker = next(worker for worker in (self._started if self._in_order else self._ended) if worker in self._ended)
        self._started.remove(worker)
        return worker, self._alone(worker, self._ended.pop(worker))

    def _alone(self, worker: RolloutWorker, ended: SegmentEnded) -> SegmentEnded:
        """Returns a finished segment, with `seconds` reduced by the time in which another worker used the device."""
        if worker.device is None:
            return ended
        free_at, self._device_free_at[worker.device] = self._device_free_at.get(worker.device, 0.0), ended.at
        return replace(ended, seconds=max(min(ended.seconds, ended.at - free_at), 0.0))

    def close(self) -> None:
        """Waits for running segments and ends the threads; a thread that is stuck in a device call is abandoned."""
        for inbox in self._inboxes.values():
            inbox.put(None)
        for thread in self._threads:
            join_or_abandon(thread)


def join_or_abandon(thread: Thread) -> bool:
    """Waits at most `CLOSE_TIMEOUT_S` for a thread; returns whether it has ended, and logs a warning if not."""
    thread.join(CLOSE_TIMEOUT_S)
    if thread.is_alive():
        log.warning("the thread %s is stuck in a segment and is abandoned", thread.name)
    return not thread.is_alive()


_Job = tuple[Future[Any], Callable[[], Any]]
