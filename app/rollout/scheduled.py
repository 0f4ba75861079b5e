"""Scheduled generation: the scheduler decides, workers carry it out. The virtual clock's sibling, with real devices."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np

from app.mesh.placement import bytes_per_device
from app.policy.kv_cache import DecodeWeights
from app.rollout.engine import BatchShape, Footprint
from app.rollout.rows import Row, Suspended
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.event_log import LogRecord
from app.rollout.scheduling.events import (
    Admit,
    Closed,
    Command,
    Commit,
    CommittedRow,
    Event,
    NewSample,
    Retire,
    RunSegment,
    Submitted,
    Suspend,
    WorkerJoined,
    WorkerLost,
)
from app.rollout.scheduling.figures import Figures, figures
from app.rollout.scheduling.ledger import State
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.streaming import Streaming
from app.rollout.tally import Tally
from app.rollout.workers import Admission, Clock, Driver, Outcome, Threads, Turns, Worker
from settings.rollout_section import Pdsr, Segment

log = logging.getLogger(__name__)


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
        self.start: dict[str, Any] = {}
        """The scheduler's snapshot before it."""
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
        for row in rows:
            self.workers[0].engine.check(row)
        opened: list[Worker] = []
        workers = self._awake()
        driver = Turns() if self.schedule.in_turn else Threads(workers, lease_s=self.schedule.lease_s)
        try:
            for worker in workers:
                worker.open(weights, rules=rules, seed=seed, policy_version=policy_version, suspends=self._suspends)
                opened.append(worker)
            run = _Run(self._scheduler(rows), driver, workers, clock=self._clock_from_now())
            self.start, self.records = run.scheduler.snapshot(), run.records
            yield from run.in_order(rows)
            self._learn(run)
        finally:
            self._stalled |= driver.close()
            for worker in opened:
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

    def _clock_from_now(self) -> Clock:
        start = self._clock()
        return lambda: self._clock() - start

    def _scheduler(self, rows: Iterable[Row]) -> Scheduler:
        uids = {row.prompt.uid for row in rows}
        schedule = self.schedule
        return Scheduler(
            schedule.policy,
            pdsr=schedule.pdsr,
            segment=schedule.segment,
            rebuild="replay" if self.workers[0].engine.exact else "prefill",
            history={uid: length for uid, length in self._history.items() if uid in uids},
        )

    def _learn(self, run: _Run) -> None:
        self._figures.append(figures(run.records))
        lengths: dict[str, list[int]] = {}
        for entry in run.scheduler.ledger:
            if entry.state is not State.DONE:
                continue
            lengths.setdefault(entry.prompt, []).append(entry.num_tokens)
        self._history |= {prompt: float(np.mean(known)) for prompt, known in lengths.items()}

    def take_tally(self) -> Tally:
        """Of what was generated since the last call, by all workers."""
        return Tally.sum([worker.engine.tally.take() for worker in self.workers])

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

    def take_figures(self) -> list[Figures]:
        """Of each rollout since the last call."""
        taken, self._figures = self._figures, []
        return taken


class _Run:
    """One rollout, from its submission to its last sample."""

    def __init__(self, scheduler: Scheduler, driver: Driver, workers: Sequence[Worker], *, clock: Clock):
        self.scheduler = scheduler
        self.records: list[LogRecord] = []
        self._driver = driver
        self._workers: Mapping[str, Worker] = {worker.name: worker for worker in workers}
        self._clock = clock
        for worker in workers:
            worker.clock = clock
        self._rows: dict[str, Row] = {}
        self._held: dict[str, str] = {}
        """Uid of a row in a worker -> the worker."""
        self._kept: dict[str, Future[Suspended]] = {}
        """Uid of a suspended row -> its cache."""

    def in_order(self, rows: Iterable[Row]) -> Iterator[Row]:
        """All of them, done."""
        self._submit(rows)
        for uid in list(self._rows):
            while self._rows[uid].finish_reason is None or self.scheduler.ledger[uid].finish is None:
                assert any(worker.is_busy for worker in self.scheduler.context.workers.values()), "nobody decodes"
                self._advance(self._driver.next())
            yield self._rows[uid]

    def _submit(self, rows: Iterable[Row]) -> None:
        samples = []
        for number, row in enumerate(rows):
            uid = row.uid if row.uid not in self._rows else f"{row.uid}@{number}"
            self._rows[uid] = row
            length = len(row.prompt.token_ids)
            samples.append(NewSample(uid, row.prompt.uid, row.sample_index, length, row.max_new_tokens))
        for worker in self._workers.values():
            shapes = worker.engine.shapes
            name, rungs = worker.name, shapes.batch_rungs[:-1]
            self._handle(WorkerJoined(self._clock(), name, worker.kind, shapes.num_slots, rungs, worker.device))
        self._handle(Submitted(self._clock(), tuple(samples)))
        self._handle(Closed(self._clock()))

    def _advance(self, outcome: Outcome) -> None:
        worker, said = outcome
        if not isinstance(said, Exception):
            return self._handle(said)
        log.warning("rollout worker %s failed, its samples go on elsewhere", worker.name, exc_info=said)
        self._handle(WorkerLost(self._clock(), worker.name, repr(said)))
        if not self.scheduler.context.workers and not self.scheduler.is_finished:
            raise said
        return None

    def _handle(self, event: Event) -> None:
        commands = self.scheduler.handle(event)
        self.records.append(LogRecord(event, tuple(commands)))
        for command in commands:
            self._do(command)

    def _do(self, command: Command) -> None:
        match command:
            case Suspend():
                self._suspend(command)
            case RunSegment():
                admissions = [self._admission(command.worker, one) for one in command.admit]
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
            kept = self._driver.suspend(worker, self._rows[uid])
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
