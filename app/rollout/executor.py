"""One rollout: real workers carry out the commands of a scheduler."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future

import numpy as np

from app.distributed.cancellation import StopCheck, StoppedError, never_stop
from app.model.kv_cache import DecodeWeights
from app.rollout.scheduling.event_log import EventLog, EventRecord, RolloutState
from app.rollout.scheduling.events import (
    Admit,
    Closed,
    Command,
    Commit,
    CommittedRow,
    Event,
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
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers import Admission, Clock, LeaseExpiredError, RolloutWorker, WorkerDriver, WorkerOutcome

log = logging.getLogger(__name__)

WORKER_FAILURES = (RuntimeError, OSError, MemoryError)
"""Errors of a worker, including JAX's, after which its samples continue on other workers. All others are bugs."""

ProgressCallback = Callable[[SampleTable], None]
"""Called after every event with the state of all samples."""


class RolloutExecutor:
    """One rollout: samples come in and are given to workers until they are done. One thread drives it."""

    def __init__(
        self,
        state: RolloutState,
        driver: WorkerDriver,
        workers: Sequence[RolloutWorker],
        *,
        clock: Clock,
        on_record: Callable[[EventRecord], None],
        event_log: EventLog | None = None,
        on_progress: ProgressCallback | None = None,
        stop_requested: StopCheck = never_stop,
    ):
        self.scheduler = state.scheduler
        self._state = state
        self._on_record, self._event_log, self._on_progress = on_record, event_log, on_progress
        self._stop_requested = stop_requested
        self._driver = driver
        _assign_unique_names(workers, state.records)
        self._workers: Mapping[str, RolloutWorker] = {worker.name: worker for worker in workers}
        self._clock = clock
        for worker in workers:
            worker.clock = clock
        self._rows: dict[str, RolloutSequence] = {}
        self._row_workers: dict[str, str] = {}
        """Maps the uid of a row in a worker to the worker's name."""
        self._suspended: dict[str, Future[SuspendedSequence]] = {}
        """Maps the uid of a suspended row to its cache."""
        self._failed: set[str] = set()
        """Names of failed workers."""
        self._num_logged: dict[str, int] = {}
        """Uid -> its tokens that the log has."""

    def run_in_order(self, rows: Iterable[RolloutSequence]) -> Iterator[RolloutSequence]:
        """All of them, done. No others come."""
        named: dict[str, RolloutSequence] = {}
        for number, row in enumerate(rows):
            named[row.uid if row.uid not in named else f"{row.uid}@{number}"] = row
        self._restore_rows(named)
        self._replace_workers()
        if not self.scheduler.is_closed:
            self.submit(named)
            self._handle_event(Closed(self._clock()))
        for uid in named:
            while not self.is_done(uid):
                self.advance()
            yield self._rows[uid]

    def add_workers(self) -> None:
        """Registers all workers with the scheduler."""
        for worker in self._workers.values():
            shapes = worker.engine.shapes
            name, buckets = worker.name, shapes.batch_buckets[:-1]
            self._handle_event(WorkerJoined(self._clock(), name, worker.kind, shapes.num_slots, buckets, worker.device))

    def submit(self, rows: Mapping[str, RolloutSequence]) -> None:
        """Adds rows, whose uids must be new to the rollout."""
        self._rows |= rows
        samples = [
            NewSample(uid, row.prompt.uid, row.sample_index, len(row.prompt.token_ids), row.max_new_tokens)
            for uid, row in rows.items()
        ]
        self._handle_event(Submitted(self._clock(), tuple(samples)))

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Sets the weights of all segments that start from now on. From any thread."""
        for name, worker in self._workers.items():
            if name not in self._failed:
                worker.queue_weights(weights, policy_version=policy_version)

    def is_done(self, uid: str) -> bool:
        return self._rows[uid].finish_reason is not None and self.scheduler.samples[uid].finish is not None

    @property
    def is_busy(self) -> bool:
        """Whether any worker decodes."""
        return any(worker.is_busy for worker in self.scheduler.context.workers.values())

    def release(self, uids: Sequence[str]) -> list[RolloutSequence]:
        """Removes finished rows from the rollout and returns them."""
        self._handle_event(Released(self._clock(), tuple(uids)))
        return [self._rows.pop(uid) for uid in uids]

    def wake(self) -> None:
        """Ends `advance` early. From any thread."""
        self._driver.wake()

    def advance(self) -> None:
        """Waits for the next outcome of a worker, or until it is woken, and handles it.

        Raises:
            StoppedError: asked to stop. What had ended by then is in the log.
            Exception: the error of the last worker, if all have failed.
        """
        if self._stop_requested():
            raise StoppedError
        assert self.is_busy, "no worker decodes"
        outcome = self._driver.next_outcome()
        if outcome is not None:
            self._handle_outcome(outcome)

    def _restore_rows(self, rows: Mapping[str, RolloutSequence]) -> None:
        """Rows as the log has them, if there is one."""
        self._rows |= rows
        lives = _row_lifetimes(self._state.records)
        for entry in self.scheduler.samples:
            if entry.num_tokens or entry.finish:
                begin, end = lives[entry.uid]
                row = RolloutSequence.restore(self._rows[entry.uid], self._state.committed_tokens.get(entry.uid, ()))
                row.finish_reason, row.elapsed_s = entry.finish, end - begin
                row.started_s = time.perf_counter() - (self._state.last_event_s - begin)
                self._rows[entry.uid], self._num_logged[entry.uid] = row, row.num_tokens

    def _replace_workers(self) -> None:
        """Whoever held rows when the log ended is gone; these workers are there instead.

        No one may be given rows too early: who idled then is gone, and who is there alone serves every kind.
        """
        gone = list(self.scheduler.context.workers.values())
        busy = [worker.name for worker in gone if worker.is_busy]
        self._report_lost([worker.name for worker in gone if not worker.is_busy])
        self.add_workers()
        self._report_lost(busy)

    def _report_lost(self, names: Sequence[str]) -> None:
        for name in names:
            self._handle_event(WorkerLost(self._clock(), name, "the process ended"))

    def _handle_outcome(self, outcome: WorkerOutcome) -> None:
        worker, result = outcome
        if isinstance(result, SegmentEnded):
            return self._handle_event(result)
        if not isinstance(result, WORKER_FAILURES):
            raise result
        log.warning("rollout worker %s failed, its samples continue on other workers", worker.name, exc_info=result)
        self._failed.add(worker.name)
        self._handle_event(WorkerLost(self._clock(), worker.name, repr(result)))
        if not isinstance(result, LeaseExpiredError):
            # Its devices may be needed, because an open rollout lasts long.
            worker.close()
        if not self.scheduler.context.workers and not self.scheduler.is_finished:
            raise result
        return None

    def _handle_event(self, event: Event) -> None:
        record = EventRecord(event, tuple(self.scheduler.handle(event)))
        self._on_record(record)
        if self._event_log is not None:
            self._event_log.append(record, self._unlogged_tokens(record))
        for command in record.commands:
            self._execute(command)
        if self._on_progress is not None:
            self._on_progress(self.scheduler.samples)

    def _unlogged_tokens(self, record: EventRecord) -> dict[str, np.ndarray]:
        """Uid -> its tokens (`RolloutSequence.segment_tokens`) that the log does not have yet."""
        found = {}
        for committed in (row for one in record.commands if isinstance(one, Commit) for row in one.rows):
            known = self._num_logged.get(committed.uid, 0)
            if committed.num_tokens > known:
                found[committed.uid] = self._rows[committed.uid].tokens_between(known, committed.num_tokens)
                self._num_logged[committed.uid] = committed.num_tokens
        return found

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
            # A copy from now on, which the worker cannot change any more.
            self._rows[uid] = row.rewound(row.num_tokens)
            if command.why != "truncated":
                self._suspended[uid] = suspended

    def _admission(self, worker: str, one: Admit) -> Admission:
        self._row_workers[one.uid] = worker
        suspended = self._suspended.pop(one.uid, None)
        return Admission(self._rows[one.uid], one.uid, one.epoch, suspended if one.how == "copy" else None)

    def _commit(self, committed: CommittedRow) -> None:
        if committed.finish is None:
            return
        self._row_workers.pop(committed.uid, None)
        if self._rows[committed.uid].finish_reason is None:
            # Truncated by the scheduler; to the engine it was not done.
            row = self._rows[committed.uid] = self._rows[committed.uid].rewound(committed.num_tokens)
            row.finish_reason = committed.finish
            row.elapsed_s = time.perf_counter() - row.started_s

    def _reclaim_rows(self, worker: str) -> None:
        """Replaces the worker's rows by copies as of their last commit, which the worker cannot change."""
        for uid in [uid for uid, holder in self._row_workers.items() if holder == worker]:
            del self._row_workers[uid]
            self._rows[uid] = self._rows[uid].rewound(self.scheduler.samples[uid].num_tokens)


def _assign_unique_names(workers: Sequence[RolloutWorker], records: Sequence[EventRecord]) -> None:
    """A name that was used before is not used again: who comes back is told by the number behind its old one."""
    used = {record.event.worker for record in records if isinstance(record.event, WorkerJoined)}
    for worker in workers:
        name = worker.name.partition("#")[0]
        names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        worker.name = next(one for one in names if one not in used)


def _row_lifetimes(records: Iterable[EventRecord]) -> dict[str, tuple[float, float]]:
    """Uid -> when it first came into a worker, and when it was last committed."""
    found: dict[str, tuple[float, float]] = {}
    for event, commands in records:
        for command in commands:
            if isinstance(command, RunSegment):
                for one in command.admit:
                    found.setdefault(one.uid, (event.at, event.at))
            elif isinstance(command, Commit):
                for one in command.rows:
                    found[one.uid] = (found[one.uid][0], event.at)
    return found
