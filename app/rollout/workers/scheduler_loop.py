"""One rollout: real workers carry out the commands of a scheduler."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from queue import SimpleQueue

from app.distributed.stop_check import STOP_CHECK_INTERVAL_S, StopCheck, StoppedError, never_stop
from app.model.decode_weights import DecodeWeights
from app.rollout.conversations import Conversations
from app.rollout.scheduling.protocol import (
    Admit,
    Answered,
    AnsweredRow,
    Closed,
    Command,
    Commit,
    CommittedRow,
    Event,
    EventRecord,
    NewSample,
    Released,
    Retire,
    RunSegment,
    SegmentEnded,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerLost,
)
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.worker import Admission, Clock, RolloutWorker
from app.rollout.workers.worker_drivers import LeaseExpiredError, WorkerDriver, WorkerOutcome

log = logging.getLogger(__name__)

WORKER_FAILURES = (RuntimeError, OSError, MemoryError)
"""Errors of a worker, including JAX's, after which its samples continue on other workers. All other errors are bugs."""

ProgressCallback = Callable[[SampleTable], None]
"""Called after every event with the state of all samples."""
SampleDoneCallback = Callable[[RolloutSequence], None]
"""Called with every sample when it is done."""
Reopen = Callable[[RolloutWorker, DecodeWeights, int], bool]
"""Opens a failed worker with weights of a version, under its next name; returns False, with a warning, if it fails."""


def name_rows(rows: Iterable[RolloutSequence]) -> dict[str, RolloutSequence]:
    """Returns the rows by names, which are their uids as far as these are unique."""
    named: dict[str, RolloutSequence] = {}
    for number, row in enumerate(rows):
        named[row.uid if row.uid not in named else f"{row.uid}@{number}"] = row
    return named


class RolloutExecutor:
    """Runs one rollout: assigns submitted samples to workers until they are done.

    One thread drives it; another one may publish weights.

    Args:
        workers: open workers.
        unopened: workers that failed to open, which is tried again when weights are published.
        reopen: see `Reopen`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        driver: WorkerDriver,
        workers: Sequence[RolloutWorker],
        *,
        clock: Clock,
        unopened: Iterable[RolloutWorker] = (),
        reopen: Reopen,
        on_record: Callable[[EventRecord], None],
        on_sample_done: SampleDoneCallback | None = None,
        on_progress: ProgressCallback | None = None,
        stop_requested: StopCheck = never_stop,
        conversations: Conversations | None = None,
    ):
        self.scheduler = scheduler
        self._conversations = conversations
        if conversations is not None:
            conversations.pool.on_reply = driver.wake
        self._acting: dict[str, tuple[str, str]] = {}
        """Maps the key of each row that waits for its environment to its uid and its last worker."""
        self._on_record, self._on_sample_done, self._on_progress = on_record, on_sample_done, on_progress
        self._stop_requested = stop_requested
        self._driver, self._reopen = driver, reopen
        self._workers: dict[str, RolloutWorker] = {worker.name: worker for worker in workers}
        self.clock = clock
        for worker in workers:
            worker.clock = clock
        self._rows: dict[str, RolloutSequence] = {}
        self._row_workers: dict[str, str] = {}
        """Maps the uid of each row on a worker to the worker's name."""
        self._suspended: dict[str, Future[SuspendedSequence]] = {}
        """Maps the uid of a suspended row to its cache."""
        self._failed: set[str] = set()
        """Names of failed workers."""
        self._idle_failed: SimpleQueue[RolloutWorker] = SimpleQueue()
        """Failed workers that run nothing any more, so that they can be opened again."""
        for worker in unopened:
            self._idle_failed.put(worker)
        self._reopened: SimpleQueue[RolloutWorker] = SimpleQueue()
        """Failed workers that are open again and still have to join."""
        self._failure: Exception | None = None
        """Error of the last worker that failed."""

    def run_in_order(self, rows: Mapping[str, RolloutSequence]) -> Iterator[RolloutSequence]:
        """Yields all rows in order, each once it is done. No other rows may be submitted."""
        self.add_workers()
        self.submit(rows)
        self._handle_event(Closed(self.clock()))
        for uid in rows:
            while not self.is_done(uid):
                self.advance()
            yield self._rows[uid]

    def add_workers(self) -> None:
        """Registers all workers with the scheduler."""
        for worker in self._workers.values():
            self._add_worker(worker)

    def _add_worker(self, worker: RolloutWorker) -> None:
        shapes = worker.engine.shapes
        sizes = shapes.num_slots, shapes.batch_buckets[:-1], worker.device, worker.engine.programs.capacity
        self._handle_event(WorkerJoined(self.clock(), worker.name, worker.kind, *sizes, max_length=shapes.row_limit))

    def submit(self, rows: Mapping[str, RolloutSequence]) -> None:
        """Adds rows; their uids must be new to the rollout."""
        self._rows |= rows
        samples = [
            NewSample(uid, row.prompt.uid, row.sample_index, len(row.prompt.token_ids), row.max_new_tokens)
            for uid, row in rows.items()
        ]
        self._handle_event(Submitted(self.clock(), tuple(samples)))

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Sets the weights for all segments started from now on. May be called from any one other thread.

        Failed workers are opened again with them, and join the rollout under a new name.
        """
        for name, worker in list(self._workers.items()):
            if name not in self._failed:
                worker.queue_weights(weights, policy_version=policy_version)
        for _ in range(self._idle_failed.qsize()):
            worker = self._idle_failed.get()
            if not (worker.can_open and self._reopen(worker, weights, policy_version)):
                self._idle_failed.put(worker)
                continue
            # From now on it receives newer weights, even if it joins later.
            self._workers[worker.name] = worker
            self._reopened.put(worker)
            self.wake()

    def is_done(self, uid: str) -> bool:
        return self._rows[uid].finish_reason is not None and self.scheduler.samples[uid].finish is not None

    @property
    def is_busy(self) -> bool:
        """Whether any worker is decoding, or any environment has to answer."""
        return bool(self._acting) or any(worker.is_busy for worker in self.scheduler.context.workers.values())

    def release(self, uids: Sequence[str]) -> list[RolloutSequence]:
        """Removes finished rows from the rollout and returns them."""
        self._handle_event(Released(self.clock(), tuple(uids)))
        return [self._rows.pop(uid) for uid in uids]

    def close(self) -> None:
        """Closes the environments of rows that are not done."""
        if self._conversations is not None:
            self._conversations.abandon(self._rows.values())

    def wake(self) -> None:
        """Makes `advance` return early. May be called from any thread."""
        self._driver.wake()
        if self._conversations is not None:
            self._conversations.pool.wake()

    def advance(self) -> None:
        """Waits for the next outcome of a worker and handles it; returns early after `wake`, or after an answer.

        Raises:
            StoppedError: a stop was requested.
            Exception: the error of the last worker, if all workers have failed that could hold the samples.
        """
        if self._stop_requested():
            raise StoppedError
        while not self._reopened.empty():
            worker = self._reopened.get()
            self._driver.add(worker)
            self._add_worker(worker)
        if self._conversations is not None:
            is_decoding = any(worker.is_busy for worker in self.scheduler.context.workers.values())
            answered = []
            for row in self._conversations.take(timeout_s=0.0 if is_decoding else STOP_CHECK_INTERVAL_S):
                uid, worker = self._acting.pop(row.key)
                answered.append(AnsweredRow(uid, row.num_tokens, row.finish_reason))
                if row.finish_reason is not None and worker in self._workers:
                    self._workers[worker].ended_keys.append(row.key)
            if answered:
                self._handle_event(Answered(self.clock(), tuple(answered)))
            if answered or not is_decoding:
                return
        assert self.is_busy, "no worker is decoding"
        outcome = self._driver.next_outcome()
        if outcome is not None:
            self._handle_outcome(outcome)

    def _handle_outcome(self, outcome: WorkerOutcome) -> None:
        worker, result = outcome
        # Of a segment that has outlived its lease, only the end matters.
        is_late = worker.name in self._failed
        if isinstance(result, SegmentEnded):
            self._handle_event(result)
        elif isinstance(result, WORKER_FAILURES):
            self._handle_failure(worker, result, is_late=is_late)
        else:
            raise result
        if is_late or (worker.name in self._failed and not isinstance(result, LeaseExpiredError)):
            self._close_failed(worker)
        if not self.scheduler.context.workers and not self.scheduler.is_finished and self._failure is not None:
            raise self._failure

    def _handle_failure(self, worker: RolloutWorker, failure: Exception, *, is_late: bool) -> None:
        consequence = "after it was given up" if is_late else "its samples continue on other workers"
        log.warning("rollout worker %s failed; %s", worker.name, consequence, exc_info=failure)
        if not is_late:
            self._failed.add(worker.name)
            self._failure = failure
            self._handle_event(WorkerLost(self.clock(), worker.name, repr(failure)))

    def _close_failed(self, worker: RolloutWorker) -> None:
        """Frees a failed worker's devices now, because an open rollout may last long."""
        del self._workers[worker.name]
        worker.close()
        self._idle_failed.put(worker)

    def _handle_event(self, event: Event) -> None:
        record = EventRecord(event, tuple(self.scheduler.handle(event)))
        self._on_record(record)
        for command in record.commands:
            self._execute(command)
        if self._on_progress is not None:
            self._on_progress(self.scheduler.samples)
        if self.scheduler.is_stuck and self.scheduler.context.workers:
            raise self._failure or RuntimeError(
                "no rollout worker is left for samples that are longer than rollout.workers.fast.max_length: the heavy "
                "ones did not start, or were lost in an earlier rollout"
            )

    def _execute(self, command: Command) -> None:
        match command:
            case Suspend():
                self._suspend(command)
            case RunSegment() if not self._stop_requested():
                admissions = deque(self._admission(command.worker, one) for one in command.admit)
                self._driver.run_segment(self._workers[command.worker], command, admissions)
            case Commit():
                for row in command.rows:
                    self._commit(row)
            case Retire():
                self._reclaim_rows(command.worker)

    def _suspend(self, command: Suspend) -> None:
        worker = self._workers[command.worker]
        for uid in command.uids:
            del self._row_workers[uid]
            row = self._rows[uid]
            suspended = self._driver.suspend(worker, row)
            # From now on a copy, which the worker can no longer change.
            self._rows[uid] = row.rewound(row.num_tokens)
            if command.why != "truncated":
                self._suspended[uid] = suspended

    def _admission(self, worker: str, one: Admit) -> Admission:
        self._row_workers[one.uid] = worker
        suspended = self._suspended.pop(one.uid, None)
        return Admission(self._rows[one.uid], one.uid, one.epoch, suspended if one.how == "copy" else None)

    def _commit(self, committed: CommittedRow) -> None:
        if committed.is_acting:
            assert self._conversations is not None
            row = self._rows[committed.uid]
            self._acting[row.key] = committed.uid, self._row_workers.pop(committed.uid)
            self._conversations.send(row)
        if committed.finish is None:
            return
        self._row_workers.pop(committed.uid, None)
        if self._rows[committed.uid].finish_reason is None:
            # Truncated by the scheduler, so the engine has not finished it.
            row = self._rows[committed.uid] = self._rows[committed.uid].rewound(committed.num_tokens)
            row.finish(committed.finish)
        if self._conversations is not None:
            self._conversations.abandon([self._rows[committed.uid]])
        if self._on_sample_done is not None:
            self._on_sample_done(self._rows[committed.uid])

    def _reclaim_rows(self, worker: str) -> None:
        """Replaces the worker's rows with copies as of their last commit, so that it can no longer change them."""
        for uid in [uid for uid, holder in self._row_workers.items() if holder == worker]:
            del self._row_workers[uid]
            self._rows[uid] = self._rows[uid].rewound(self.scheduler.samples[uid].num_tokens)
