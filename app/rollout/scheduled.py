"""Scheduled generation: the scheduler decides, workers carry it out. The virtual clock's sibling, with real devices."""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np

from app.mesh.placement import bytes_per_device
from app.policy.kv_cache import DecodeWeights
from app.rollout.engine import BatchShape, Footprint
from app.rollout.rows import Row, Suspended
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.event_log import Begun, EventLog, LogRecord
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
from app.rollout.scheduling.figures import Figures, figures
from app.rollout.scheduling.ledger import Ledger, State
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.streaming import Streaming
from app.rollout.tally import Tally
from app.rollout.workers import Admission, Clock, Driver, Outcome, Threads, Turns, Worker
from settings.rollout_section import Pdsr, Segment

log = logging.getLogger(__name__)

FAILURES = (RuntimeError, OSError, MemoryError)
"""Of a worker, whose samples go on elsewhere; what JAX raises among them. Any other exception is the program's own."""


@dataclass(frozen=True)
class Schedule:
    """How the work is dealt."""

    policy: str
    """A name in `POLICIES`."""
    pdsr: Pdsr
    segment: Segment
    in_turn: bool
    """One thread drives all workers: the same run, the same commands."""
    lease_s: float | None = None
    """How long a worker with a thread of its own may be silent in a segment; None: any time."""


Watch = Callable[[Ledger], None]
"""Is shown after every event where all samples are."""


class ScheduledWorkers(Streaming):
    """Workers under a scheduler.

    Args:
        workers: with slots of one size and as many devices each, where samples are to be exact.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        schedule: Schedule,
        *,
        decode_text: Callable[[Sequence[int]], str],
        clock: Clock = time.perf_counter,
    ):
        super().__init__(decode_text=decode_text)
        self.workers = tuple(workers)
        self.schedule = schedule
        self.records: list[LogRecord] = []
        """What the scheduler was told and what it answered in the last rollout."""
        self.start: Mapping[str, Any] = {}
        """The scheduler's snapshot before it."""
        self.log: EventLog | None = None
        """Where the next rollout is written down, and goes on from."""
        self.watch: Watch | None = None
        self._clock = clock
        self._history: dict[str, float] = {}
        """Prompt -> mean length of its samples when it came last."""
        self._figures: list[Figures] = []
        self._stalled: dict[Worker, Thread] = {}

    @property
    def _suspends(self) -> bool:
        """Whether samples may leave their slots before they are done, if only with a worker that dies."""
        return self.schedule.policy != "sync" or len(self.workers) > 1

    def compile(self, rules: SamplingRules) -> None:
        """See `Streaming`."""
        for worker in self.workers:
            worker.engine.compile(rules, suspends=self._suspends)

    def _in_order(
        self, weights: DecodeWeights, rows: deque[Row], *, rules: SamplingRules, seed: int, policy_version: int
    ) -> Generator[Row, None, None]:
        """See `Streaming`.

        Raises:
            Exception: what the last worker failed with, where all have.
        """
        self.check(rows)
        scheduler = self.scheduler({row.prompt.uid for row in rows})
        begun = self.log.begin(scheduler) if self.log else Begun.now(scheduler)
        self.start, self.records = begun.start, begun.records
        opened = self.opened(
            *(weights, begun),
            rules=rules,
            seed=seed,
            policy_version=policy_version,
            tell=begun.records.append,
            log=self.log,
        )
        with opened as run:
            yield from run.in_order(rows)
            self._learn(run)

    def check(self, rows: Iterable[Row]) -> None:
        """Raises InputError for a row that no slot has room for."""
        for row in rows:
            self.workers[0].engine.check(row)

    @contextmanager
    def opened(
        self,
        weights: DecodeWeights,
        begun: Begun,
        *,
        rules: SamplingRules,
        seed: int,
        policy_version: int,
        tell: Callable[[LogRecord], None],
        log: EventLog | None = None,
    ) -> Iterator[Run]:
        """A rollout by all workers that are awake. Leaving it waits for the segments that still run.

        Args:
            tell: is told what the scheduler is told from now on, and what it answers.
            log: that `begun` is from.

        Raises:
            RuntimeError: all workers sleep.
        """
        suspends = self._suspends or bool(begun.records)
        awake = self._awake()
        driver = Turns() if self.schedule.in_turn else Threads(awake, lease_s=self.schedule.lease_s)
        try:
            workers = _opened(awake, weights, rules=rules, seed=seed, policy_version=policy_version, suspends=suspends)
            clock = self._clock_from(begun.at)
            yield Run(begun, driver, workers, clock=clock, tell=tell, log=log, watch=self.watch)
        finally:
            try:
                self._stalled |= driver.close()
            finally:
                for worker in awake:
                    if worker not in self._stalled:
                        worker.close()

    def _awake(self) -> list[Worker]:
        """All workers but those that are still in a segment of an earlier rollout.

        Raises:
            RuntimeError: there is none.
        """
        for worker, thread in list(self._stalled.items()):
            if not thread.is_alive():
                worker.close()
                del self._stalled[worker]
        workers = [worker for worker in self.workers if worker not in self._stalled]
        if not workers:
            raise RuntimeError("every rollout worker has stalled in an earlier rollout")
        return workers

    def _clock_from(self, at: float) -> Clock:
        start = self._clock() - at
        return lambda: self._clock() - start

    def scheduler(self, prompts: Iterable[str] = ()) -> Scheduler:
        """A new one, that knows how long samples of these prompts were when they came last."""
        schedule = self.schedule
        return Scheduler(
            schedule.policy,
            pdsr=schedule.pdsr,
            segment=schedule.segment,
            rebuild="replay" if self.workers[0].engine.exact else "prefill",
            history={uid: self._history[uid] for uid in prompts if uid in self._history},
        )

    def _learn(self, run: Run) -> None:
        self.note(figures(self.records))
        lengths: dict[str, list[int]] = {}
        for entry in run.scheduler.ledger:
            if entry.state is not State.DONE:
                continue
            lengths.setdefault(entry.prompt, []).append(entry.num_tokens)
        self._history |= {prompt: float(np.mean(known)) for prompt, known in lengths.items()}

    def take_tally(self) -> Tally:
        """Of what was generated since the last call, by all workers."""
        return Tally.sum([worker.take_tally() for worker in self.workers])

    @property
    def batch_shape(self) -> BatchShape:
        """Of the worker with most slots, at its fullest."""
        return max((worker.engine.batch_shape for worker in self.workers), key=lambda shape: shape.num_rows)

    def footprint(self) -> Footprint:
        """What full slots hold on the fullest device."""
        found = [worker.engine.footprint() for worker in self.workers]
        if self.workers[0].device is None:
            return max(found, key=bytes_per_device)
        weights, prompts, slots = zip(*found, strict=True)
        return Footprint(weights[0], sum(prompts, ()), sum(slots, ()))

    def note(self, found: Figures) -> None:
        """Keeps the figures of a rollout, or of a part of one, until they are taken."""
        self._figures.append(found)

    def take_figures(self) -> list[Figures]:
        """Those noted since the last call."""
        taken, self._figures = self._figures, []
        return taken


def _opened(workers: Sequence[Worker], weights: DecodeWeights, **arguments: Any) -> list[Worker]:
    """Those that could be opened; see `Worker.open`.

    Raises:
        Exception: what the last one failed with, where none could.
    """
    opened: list[Worker] = []
    for worker in workers:
        try:
            worker.open(weights, **arguments)
        except FAILURES as failure:
            if worker is workers[-1] and not opened:
                raise
            log.warning("rollout worker %s cannot start, the others go on without it", worker.name, exc_info=failure)
        else:
            opened.append(worker)
    return opened


class Run:
    """One rollout: samples come in and are given to workers until they are done. One thread drives it."""

    def __init__(
        self,
        begun: Begun,
        driver: Driver,
        workers: Sequence[Worker],
        *,
        clock: Clock,
        tell: Callable[[LogRecord], None],
        log: EventLog | None = None,
        watch: Watch | None = None,
    ):
        self.scheduler = begun.scheduler
        self._begun = begun
        self._tell, self._log, self._watch = tell, log, watch
        self._driver = driver
        _name_anew(workers, begun.records)
        self._workers: Mapping[str, Worker] = {worker.name: worker for worker in workers}
        self._clock = clock
        for worker in workers:
            worker.clock = clock
        self._rows: dict[str, Row] = {}
        self._held: dict[str, str] = {}
        """Uid of a row in a worker -> the worker."""
        self._kept: dict[str, Future[Suspended]] = {}
        """Uid of a suspended row -> its cache."""
        self._logged: dict[str, int] = {}
        """Uid -> its tokens that the log has."""

    def in_order(self, rows: Iterable[Row]) -> Iterator[Row]:
        """All of them, done. No others come."""
        named: dict[str, Row] = {}
        for number, row in enumerate(rows):
            named[row.uid if row.uid not in named else f"{row.uid}@{number}"] = row
        self._go_on(named)
        self.join()
        if not self.scheduler.is_closed:
            self.submit(named)
            self._handle(Closed(self._clock()))
        for uid in named:
            while not self.is_done(uid):
                self.advance()
            yield self._rows[uid]

    def join(self) -> None:
        """Tells the scheduler of all workers."""
        for worker in self._workers.values():
            shapes = worker.engine.shapes
            name, rungs = worker.name, shapes.batch_rungs[:-1]
            self._handle(WorkerJoined(self._clock(), name, worker.kind, shapes.num_slots, rungs, worker.device))

    def submit(self, rows: Mapping[str, Row]) -> None:
        """Rows by uids that were never used before in the rollout."""
        self._rows |= rows
        samples = [
            NewSample(uid, row.prompt.uid, row.sample_index, len(row.prompt.token_ids), row.max_new_tokens)
            for uid, row in rows.items()
        ]
        self._handle(Submitted(self._clock(), tuple(samples)))

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Segments that begin from now on are drawn by these weights. From any thread."""
        for worker in self._workers.values():
            worker.offer(weights, policy_version=policy_version)

    def is_done(self, uid: str) -> bool:
        return self._rows[uid].finish_reason is not None and self.scheduler.ledger[uid].finish is not None

    @property
    def is_busy(self) -> bool:
        """Whether anybody decodes."""
        return any(worker.is_busy for worker in self.scheduler.context.workers.values())

    def release(self, uids: Sequence[str]) -> list[Row]:
        """The rows, done; nothing is kept of them."""
        self._handle(Released(self._clock(), tuple(uids)))
        return [self._rows.pop(uid) for uid in uids]

    def wake(self) -> None:
        """Ends `advance` early. From any thread."""
        self._driver.wake()

    def advance(self) -> None:
        """Waits until a worker has something to say, or until it is woken, and goes on from there.

        Raises:
            Exception: what the last worker failed with, where all have.
        """
        assert self.is_busy, "nobody decodes"
        outcome = self._driver.next()
        if outcome is not None:
            self._advance(outcome)

    def _go_on(self, rows: Mapping[str, Row]) -> None:
        """Rows as the log has them, if there is one; whoever held them then is gone."""
        self._rows |= rows
        lives = _lives(self._begun.records)
        for entry in self.scheduler.ledger:
            if entry.num_tokens or entry.finish:
                begin, end = lives[entry.uid]
                row = Row.restored(self._rows[entry.uid], self._begun.drawn.get(entry.uid, ()))
                row.finish_reason, row.elapsed_s = entry.finish, end - begin
                row.started_s = time.perf_counter() - (self._begun.at - begin)
                self._rows[entry.uid], self._logged[entry.uid] = row, row.num_tokens
        # Idle ones first: else they would be given what the others had.
        gone = sorted(self.scheduler.context.workers.values(), key=lambda worker: worker.is_busy)
        for name in [worker.name for worker in gone]:
            self._handle(WorkerLost(self._clock(), name, "the process ended"))

    def _advance(self, outcome: Outcome) -> None:
        worker, said = outcome
        if isinstance(said, SegmentEnded):
            return self._handle(said)
        if not isinstance(said, FAILURES):
            raise said
        log.warning("rollout worker %s failed, its samples go on elsewhere", worker.name, exc_info=said)
        self._handle(WorkerLost(self._clock(), worker.name, repr(said)))
        if not self.scheduler.context.workers and not self.scheduler.is_finished:
            raise said
        return None

    def _handle(self, event: Event) -> None:
        record = LogRecord(event, tuple(self.scheduler.handle(event)))
        self._tell(record)
        if self._log is not None:
            self._log.append(record, self._newly_committed(record))
        for command in record.commands:
            self._do(command)
        if self._watch is not None:
            self._watch(self.scheduler.ledger)

    def _newly_committed(self, record: LogRecord) -> dict[str, np.ndarray]:
        """Uid -> its tokens (`Row.drawn`) that the log does not have yet."""
        found = {}
        for committed in (row for one in record.commands if isinstance(one, Commit) for row in one.rows):
            known = self._logged.get(committed.uid, 0)
            if committed.num_tokens > known:
                found[committed.uid] = self._rows[committed.uid].drawn_after(known, committed.num_tokens)
                self._logged[committed.uid] = committed.num_tokens
        return found

    def _do(self, command: Command) -> None:
        match command:
            case Suspend():
                self._suspend(command)
            case RunSegment():
                admissions = deque(self._admission(command.worker, one) for one in command.admit)
                self._driver.run(self._workers[command.worker], command, admissions)
            case Commit():
                for row in command.rows:
                    self._commit(row)
            case Retire():
                self._take_back(command.worker)

    def _suspend(self, command: Suspend) -> None:
        worker = self._workers[command.worker]
        for uid in command.uids:
            del self._held[uid]
            row = self._rows[uid]
            kept = self._driver.suspend(worker, row)
            # Another from now on, whatever becomes of the worker and of what it still holds.
            self._rows[uid] = row.rewound(row.num_tokens)
            if command.why != "truncated":
                self._kept[uid] = kept

    def _admission(self, worker: str, one: Admit) -> Admission:
        self._held[one.uid] = worker
        kept = self._kept.pop(one.uid, None)
        return Admission(self._rows[one.uid], one.uid, one.epoch, kept=kept if one.how == "copy" else None)

    def _commit(self, committed: CommittedRow) -> None:
        if committed.finish is None:
            return
        self._held.pop(committed.uid, None)
        if self._rows[committed.uid].finish_reason is None:
            # Truncated: to the engine it was not done.
            row = self._rows[committed.uid] = self._rows[committed.uid].rewound(committed.num_tokens)
            row.finish_reason = committed.finish
            row.elapsed_s = time.perf_counter() - row.started_s

    def _take_back(self, worker: str) -> None:
        """The worker's rows as they were last committed, out of reach of whatever it may still do to them."""
        for uid in [uid for uid, holder in self._held.items() if holder == worker]:
            del self._held[uid]
            self._rows[uid] = self._rows[uid].rewound(self.scheduler.ledger[uid].num_tokens)


def _name_anew(workers: Sequence[Worker], records: Sequence[LogRecord]) -> None:
    """A name that was used before is not used again: who comes back is told by the number behind its old one."""
    used = {record.event.worker for record in records if isinstance(record.event, WorkerJoined)}
    for worker in workers:
        name = worker.name.partition("#")[0]
        names = itertools.chain([name], (f"{name}#{number}" for number in itertools.count(2)))
        worker.name = next(one for one in names if one not in used)


def _lives(records: Iterable[LogRecord]) -> dict[str, tuple[float, float]]:
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
