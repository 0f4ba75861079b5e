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
from app.rollout.counters import RolloutCounters
from app.rollout.executor import WORKER_FAILURES, ProgressCallback, RolloutExecutor, SampleDoneCallback
from app.rollout.generator import SampleGenerator
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import EventRecord
from app.rollout.scheduling.metrics import ScheduleMetrics, schedule_metrics
from app.rollout.scheduling.sample_states import SampleState
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import RolloutSequence
from app.rollout.workers import Clock, RolloutWorker, SequentialDriver, ThreadedDriver
from settings.schema.rollout import PdsrSettings, SegmentSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleConfig:
    """How the work is dealt."""

    policy: str
    """A name in `POLICIES`."""
    pdsr: PdsrSettings
    segment: SegmentSettings
    single_thread: bool
    """One thread drives all workers: the same run, the same commands."""
    lease_s: float | None = None
    """How long a worker with a thread of its own may be silent in a segment; None: any time."""


class RolloutWorkerPool(SampleGenerator):
    """Workers under a scheduler.

    Args:
        workers: with slots of one size and as many devices each, where samples are to be exact.
    """

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: Callable[[Sequence[int]], str],
        clock: Clock = time.perf_counter,
    ):
        super().__init__(decode_text=decode_text)
        self.workers = tuple(workers)
        self.schedule = schedule
        self.records: list[EventRecord] = []
        """What the scheduler was told and what it answered in the last rollout."""
        self.on_sample_done: SampleDoneCallback | None = None
        self.on_progress: ProgressCallback | None = None
        self._clock = clock
        self.length_history: Mapping[str, float] = {}
        """Prompt -> mean length of its samples when it came last; decides the schedule of the next rollout."""
        self._length_updates: dict[str, float] = {}
        """Of `history`, what was learned here since `take_news`."""
        self._metrics: list[ScheduleMetrics] = []
        self._stalled: dict[RolloutWorker, Thread] = {}

    @property
    def _suspends(self) -> bool:
        """Whether samples may leave their slots before they are done, if only with a worker that dies."""
        return self.schedule.policy != "sync" or len(self.workers) > 1

    def compile(self, rules: SamplingRules) -> None:
        """See `Streaming`."""
        for worker in self.workers:
            worker.engine.compile(rules, suspends=self._suspends)

    def _run_in_order(
        self,
        weights: DecodeWeights,
        rows: deque[RolloutSequence],
        *,
        rules: SamplingRules,
        seed: int,
        policy_version: int,
    ) -> Generator[RolloutSequence, None, None]:
        """See `Streaming`.

        Raises:
            StoppedError: asked to stop.
            Exception: what the last worker failed with, where all have.
        """
        self.check_fits(rows)
        scheduler = self.make_scheduler({row.prompt.uid for row in rows})
        self.records = []
        opened = self.open_executor(
            *(weights, scheduler),
            rules=rules,
            seed=seed,
            policy_version=policy_version,
            on_record=self.records.append,
            on_sample_done=self.on_sample_done,
        )
        with opened as run:
            yield from run.run_in_order(rows)
            self._record_results(run)

    def check_fits(self, rows: Iterable[RolloutSequence]) -> None:
        """Raises InputError for a row that no slot has room for."""
        for row in rows:
            self.workers[0].engine.check_fits(row)

    @contextmanager
    def open_executor(
        self,
        weights: DecodeWeights,
        scheduler: Scheduler,
        *,
        rules: SamplingRules,
        seed: int,
        policy_version: int,
        on_record: Callable[[EventRecord], None],
        on_sample_done: SampleDoneCallback | None = None,
    ) -> Iterator[RolloutExecutor]:
        """A rollout by all workers that are awake. Leaving it waits for the segments that still run.

        Args:
            on_record: is called with every event of the scheduler and its answer.
            on_sample_done: is called with every sample when it is done.

        Raises:
            RuntimeError: all workers sleep.
        """
        awake = self._available_workers()
        driver = (
            SequentialDriver() if self.schedule.single_thread else ThreadedDriver(awake, lease_s=self.schedule.lease_s)
        )
        try:
            workers = _open_workers(
                awake, weights, rules=rules, seed=seed, policy_version=policy_version, suspends=self._suspends
            )
            # The workers have them: an open rollout outlives these by many versions.
            del weights
            start = self._clock()
            yield RolloutExecutor(
                scheduler,
                driver,
                workers,
                clock=lambda: self._clock() - start,
                on_record=on_record,
                on_sample_done=on_sample_done,
                on_progress=self.on_progress,
                stop_requested=self.stop_requested,
            )
        finally:
            try:
                self._stalled |= driver.close()
            finally:
                for worker in awake:
                    if worker not in self._stalled:
                        worker.close()

    def _available_workers(self) -> list[RolloutWorker]:
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

    def make_scheduler(self, prompts: Iterable[str] = ()) -> Scheduler:
        """A new one, that knows how long samples of these prompts were when they came last."""
        schedule = self.schedule
        return Scheduler(
            schedule.policy,
            pdsr=schedule.pdsr,
            segment=schedule.segment,
            rebuild="replay" if self.workers[0].engine.exact else "prefill",
            history={uid: self.length_history[uid] for uid in prompts if uid in self.length_history},
        )

    def _record_results(self, executor: RolloutExecutor) -> None:
        self.add_metrics(schedule_metrics(self.records))
        lengths: dict[str, list[int]] = {}
        for entry in executor.scheduler.samples:
            if entry.state is not SampleState.DONE:
                continue
            lengths.setdefault(entry.prompt, []).append(entry.num_tokens)
        self.record_lengths({prompt: float(np.mean(known)) for prompt, known in lengths.items()})

    def record_lengths(self, lengths: Mapping[str, float]) -> None:
        """Mean lengths of prompts whose samples are done."""
        self._length_updates |= lengths
        self.length_history = {**self.length_history, **lengths}

    def take_length_updates(self) -> dict[str, float]:
        """What was learned since the last call, for other hosts to know."""
        taken, self._length_updates = self._length_updates, {}
        return taken

    def take_counters(self) -> RolloutCounters:
        """Of what was generated since the last call, by all workers."""
        return RolloutCounters.sum([worker.take_counters() for worker in self.workers])

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

    def add_metrics(self, metrics: ScheduleMetrics) -> None:
        """Keeps the figures of a rollout, or of a part of one, until they are taken."""
        self._metrics.append(metrics)

    def take_schedule_metrics(self) -> list[ScheduleMetrics]:
        """Those noted since the last call."""
        taken, self._metrics = self._metrics, []
        return taken


def _open_workers(workers: Sequence[RolloutWorker], weights: DecodeWeights, **arguments: Any) -> list[RolloutWorker]:
    """Those that could be opened; see `Worker.open`.

    Raises:
        Exception: what the last one failed with, where none could.
    """
    opened: list[RolloutWorker] = []
    for worker in workers:
        try:
            worker.open(weights, **arguments)
        except WORKER_FAILURES as failure:
            if worker is workers[-1] and not opened:
                raise
            log.warning("rollout worker %s cannot start, the others go on without it", worker.name, exc_info=failure)
        else:
            opened.append(worker)
    return opened
