"""Scheduled generation: the scheduler decides, workers carry it out."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np

from app.mesh.placement import bytes_per_device
from app.model.kv_cache import DecodeWeights
from app.rollout.batch_engine import BatchShape, Footprint
from app.rollout.counters import Tally
from app.rollout.executor import FAILURES, Run, Watch
from app.rollout.generator import Streaming
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.event_log import Begun, EventLog, LogRecord
from app.rollout.scheduling.metrics import Figures, figures
from app.rollout.scheduling.sample_states import State
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import Row
from app.rollout.workers import Clock, Threads, Turns, Worker
from settings.schema.rollout import Pdsr, Segment

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
        self.log: EventLog | None = None
        """Where the next rollout is written down, and goes on from."""
        self.watch: Watch | None = None
        self._clock = clock
        self.history: Mapping[str, float] = {}
        """Prompt -> mean length of its samples when it came last; decides the schedule of the next rollout."""
        self._news: dict[str, float] = {}
        """Of `history`, what was learned here since `take_news`."""
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
            StoppedError: asked to stop. A log has what had ended by then, for another rollout to go on from.
            Exception: what the last worker failed with, where all have.
        """
        self.check(rows)
        scheduler = self.scheduler({row.prompt.uid for row in rows})
        begun = self.log.begin(scheduler) if self.log else Begun.now(scheduler)
        self.records = begun.records
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
            # The workers have them: an open rollout outlives these by many versions.
            del weights
            clock = self._clock_from(begun.at)
            asked = self.asked_to_stop
            yield Run(begun, driver, workers, clock=clock, tell=tell, log=log, watch=self.watch, asked_to_stop=asked)
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
            history={uid: self.history[uid] for uid in prompts if uid in self.history},
        )

    def _learn(self, run: Run) -> None:
        self.note(figures(self.records))
        lengths: dict[str, list[int]] = {}
        for entry in run.scheduler.ledger:
            if entry.state is not State.DONE:
                continue
            lengths.setdefault(entry.prompt, []).append(entry.num_tokens)
        self.learn({prompt: float(np.mean(known)) for prompt, known in lengths.items()})

    def learn(self, lengths: Mapping[str, float]) -> None:
        """Mean lengths of prompts whose samples are done."""
        self._news |= lengths
        self.history = {**self.history, **lengths}

    def take_news(self) -> dict[str, float]:
        """What was learned since the last call, for other hosts to know."""
        taken, self._news = self._news, {}
        return taken

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

    def shut_down(self) -> None:
        """No rollout comes any more: ends what was started for them beyond this process."""

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
