"""Runs one rollout: reports events to the scheduler, and passes its commands to workers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future

from app.distributed.stop_check import STOP_CHECK_INTERVAL_S, StopCheck, StoppedError
from app.model.decode_weights import DecodeWeights
from app.rollout.conversations import Conversations
from app.rollout.scheduling.protocol import (
    FINISH_LENGTH,
    Admit,
    Answered,
    Closed,
    Command,
    Event,
    EventRecord,
    NewSample,
    Released,
    RowReport,
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
from app.rollout.workers.worker import Admission, RolloutWorker, WorkerDiedError
from app.rollout.workers.worker_threads import WorkerThreads

log = logging.getLogger(__name__)

ProgressCallback = Callable[[SampleTable], None]
"""Called after every event with the state of all samples."""
SampleDoneCallback = Callable[[RolloutSequence], None]
"""Called with every sample when it is done."""


class RolloutExecutor:
    """Runs one rollout: assigns submitted samples to workers until they are done.

    Only one thread at a time may use it, except for `publish` and `wake`.

    Args:
        workers: workers that the caller opens before the rollout and closes after it.
        in_order: whether segments are handled in start order; see `WorkerThreads`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        workers: Sequence[RolloutWorker],
        *,
        in_order: bool,
        on_record: Callable[[EventRecord], None],
        on_sample_done: SampleDoneCallback | None,
        on_progress: ProgressCallback | None,
        stop_requested: StopCheck,
        conversations: Conversations | None,
    ):
        self.scheduler = scheduler
        self._threads = WorkerThreads(workers, in_order=in_order)
        self._conversations = conversations
        if conversations is not None:
            conversations.pool.on_reply = self._threads.wake
        self._on_record, self._on_sample_done, self._on_progress = on_record, on_sample_done, on_progress
        self._stop_requested = stop_requested
        self._workers: dict[str, RolloutWorker] = {worker.name: worker for worker in workers}
        start_s = time.perf_counter()
        # Not a method, because workers outlive the rollout and would keep its rows and their caches alive.
        self.clock: Callable[[], float] = lambda: time.perf_counter() - start_s
        """Returns the seconds since the start of the rollout."""
        for worker in workers:
            worker.clock = self.clock
        self._rows: dict[str, RolloutSequence] = {}
        self._suspended: dict[str, Future[SuspendedSequence]] = {}
        """Name of a suspended row -> future of the row with its cache."""
        self._death: WorkerDiedError | None = None
        """Error of the last lost worker."""

    def run_in_order(self, rows: Iterable[RolloutSequence]) -> Iterator[RolloutSequence]:
        """Yields all rows in order, each once it is done. No other rows may be submitted."""
        self.add_workers()
        names = self.submit(rows)
        self._handle_event(Closed(self.clock()))
        for uid in names:
            while not self.is_done(uid):
                self.advance()
            yield self._rows[uid]

    def add_workers(self) -> None:
        """Registers all workers with the scheduler."""
        for worker in self._workers.values():
            shapes = worker.engine.shapes
            sizes = shapes.num_slots, shapes.batch_buckets[:-1], worker.device, worker.engine.programs.capacity
            limits = shapes.row_limit, worker.keeps_caches
            self._handle_event(WorkerJoined(self.clock(), worker.name, worker.kind, *sizes, *limits))

    def submit(self, rows: Iterable[RolloutSequence], *, suffix: str = "") -> list[str]:
        """Adds rows and returns their unique names: the uid, a number if the uid repeats, and the suffix.

        Args:
            suffix: distinguishes these rows from earlier rows with the same uids.
        """
        samples: dict[str, NewSample] = {}
        for number, row in enumerate(rows):
            name = f"{row.uid}{suffix}"
            row.name = name if name not in samples else f"{row.uid}@{number}{suffix}"
            sizes = len(row.prompt.token_ids), row.max_new_tokens
            samples[row.name] = NewSample(row.name, row.prompt.uid, row.sample_index, *sizes)
            self._rows[row.name] = row
        self._handle_event(Submitted(self.clock(), tuple(samples.values())))
        return list(samples)

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Sets the weights for all segments started from now on; see `RolloutWorker.queue_weights`.

        One other thread may call it.
        """
        for worker in self._workers.values():
            if not worker.is_lost:
                worker.queue_weights(weights, policy_version=policy_version)

    def is_done(self, uid: str) -> bool:
        return self._rows[uid].finish_reason is not None and self.scheduler.samples[uid].finish is not None

    @property
    def is_busy(self) -> bool:
        """Whether any worker is decoding or any environment has yet to answer."""
        return self._is_decoding or (self._conversations is not None and self._conversations.num_acting > 0)

    @property
    def _is_decoding(self) -> bool:
        return any(worker.is_busy for worker in self.scheduler.context.workers.values())

    def release(self, uids: Sequence[str]) -> list[RolloutSequence]:
        """Removes finished rows from the rollout and returns them."""
        self._handle_event(Released(self.clock(), tuple(uids)))
        return [self._rows.pop(uid) for uid in uids]

    def close(self) -> None:
        """Closes the environments of unfinished rows, and waits for running segments."""
        if self._conversations is not None:
            self._conversations.abandon(self._rows.values())
        self._threads.close()

    def wake(self) -> None:
        """Makes `advance` return early. May be called from any thread."""
        self._threads.wake()
        if self._conversations is not None:
            self._conversations.pool.wake()

    def advance(self) -> None:
        """Waits until a segment ends, and handles its result; returns early after `wake` or an environment's answer.

        Raises:
            StoppedError: a stop was requested.
            WorkerDiedError: all workers that could run the remaining samples have died.
            Exception: the error that a worker raised.
        """
        if self._stop_requested():
            raise StoppedError
        if self._conversations is not None:
            is_decoding = self._is_decoding
            answered = self._conversations.take(timeout_s=0.0 if is_decoding else STOP_CHECK_INTERVAL_S)
            for row in answered:
                holder = self.scheduler.samples[row.name].held_by
                if row.finish_reason is not None and holder is not None:
                    self._workers[holder].ended_keys.append(row.key)
            if answered:
                reports = (RowReport(row.name, row.num_tokens, row.finish_reason) for row in answered)
                self._handle_event(Answered(self.clock(), tuple(reports)))
            if answered or not is_decoding:
                return
        assert self.is_busy, "no worker is decoding"
        outcome = self._threads.next_outcome()
        if outcome is None:
            return
        worker, result = outcome
        if isinstance(result, SegmentEnded):
            self._handle_event(result)
        elif not isinstance(result, WorkerDiedError):
            raise result
        elif not worker.is_lost:
            log.warning(
                "rollout worker %s is lost; its samples continue on other workers", worker.name, exc_info=result
            )
            worker.is_lost, self._death = True, result
            self._handle_event(WorkerLost(self.clock(), worker.name))

    def _handle_event(self, event: Event) -> None:
        record = EventRecord(event, tuple(self.scheduler.handle(event)))
        self._on_record(record)
        if isinstance(event, SegmentEnded | Answered):
            for report in event.rows:
                self._commit(report)
        for command in record.commands:
            self._execute(command)
        if self._on_progress is not None:
            self._on_progress(self.scheduler.samples)
        if self.scheduler.is_stuck:
            raise self._death or WorkerDiedError(
                "no rollout worker is left for samples longer than rollout.workers.fast.max_length: the heavy "
                "workers died in an earlier rollout; see the log, and run the command again (grpo train with --resume "
                "auto)"
            )

    def _execute(self, command: Command) -> None:
        match command:
            case Suspend():
                self._suspend(command)
            case RunSegment() if not self._stop_requested():
                admissions = deque(self._admission(one) for one in command.admit)
                self._threads.run_segment(self._workers[command.worker], command, admissions)

    def _suspend(self, command: Suspend) -> None:
        row = self._rows[command.uid]
        suspended = self._threads.suspend(self._workers[command.worker], row)
        # Continue with a copy, which the old worker cannot change.
        row = self._rows[row.name] = row.rewound(row.num_tokens)
        if command.why == "truncated":
            row.finish(FINISH_LENGTH)
            self._finish(row)
        else:
            self._suspended[row.name] = suspended

    def _admission(self, one: Admit) -> Admission:
        suspended = self._suspended.pop(one.uid, None)
        return Admission(self._rows[one.uid], suspended if one.how == "copy" else None)

    def _commit(self, report: RowReport) -> None:
        row = self._rows[report.uid]
        if report.finish is not None:
            self._finish(row)
        elif report.turn_end is not None:
            assert self._conversations is not None
            self._conversations.send(row)

    def _finish(self, row: RolloutSequence) -> None:
        if self._conversations is not None:
            self._conversations.abandon([row])
        if self._on_sample_done is not None:
            self._on_sample_done(row)
