"""Scheduled generation: a scheduler assigns samples to workers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from threading import Thread

import numpy as np

from app.mesh.placement import bytes_per_device
from app.model.decode_weights import DecodeWeights
from app.rollout.batch_engine import Footprint
from app.rollout.counters import RolloutCounters
from app.rollout.request import GenerationRequest
from app.rollout.sample_generator import SampleGenerator
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.length_estimator import NOTHING_LEARNED, LearnedLengths
from app.rollout.scheduling.metrics import ScheduleMetrics, schedule_metrics
from app.rollout.scheduling.protocol import EventRecord
from app.rollout.scheduling.sample_states import SampleState
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import RolloutSequence
from app.rollout.slots.slot_engine import SlotEngine
from app.rollout.stop_strings import DecodeText
from app.rollout.workers.scheduler_loop import (
    WORKER_FAILURES,
    ProgressCallback,
    Reopen,
    RolloutExecutor,
    SampleDoneCallback,
    name_rows,
)
from app.rollout.workers.worker import Clock, RolloutWorker
from app.rollout.workers.worker_drivers import SequentialDriver, ThreadedDriver, WorkerDriver
from settings.schema.rollout import PdsrSettings, SegmentSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScheduleConfig:
    """Rules for the assignment of samples to workers."""

    policy: str
    """Name in `POLICIES`."""
    pdsr: PdsrSettings
    segment: SegmentSettings
    single_thread: bool
    """Whether one thread drives all workers, so that a repeated run gives the same commands."""
    lease_s: float | None = None
    """Maximum duration of a segment if each worker has its own thread; None = no limit."""


class RolloutWorkerPool(SampleGenerator):
    """Generates samples on workers controlled by a scheduler.

    Args:
        workers: workers of the pool; in the exact mode, all need the same number of devices and the same
            `SlotShapes.rows_together`.
    """

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: DecodeText,
        clock: Clock = time.perf_counter,
    ):
        super().__init__(decode_text=decode_text)
        self.workers = tuple(workers)
        self.schedule = schedule
        self.records: list[EventRecord] = []
        """Events of the last rollout, with the commands that answered them."""
        self.on_sample_done: SampleDoneCallback | None = None
        self.on_progress: ProgressCallback | None = None
        self._clock = clock
        self.shared_lengths = NOTHING_LEARNED
        """What all hosts had found out about lengths when they last shared it."""
        self.new_lengths = NOTHING_LEARNED
        """What this host has found out since then."""
        self._metrics: list[ScheduleMetrics] = []
        self._stalled: dict[RolloutWorker, Thread] = {}

    @property
    def _suspends(self) -> bool:
        """Whether samples may leave their slots before they are done, for example if a worker fails."""
        return self.schedule.policy != "sync" or len(self.workers) > 1

    def compile(self, rules: SamplingRules) -> None:
        """Compiles the programs of all workers."""
        for worker in self.workers:
            worker.engine.compile(rules, suspends=self._suspends)

    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        """See `SampleGenerator`.

        Raises:
            StoppedError: a stop was requested.
            Exception: the error of the last worker, if all workers have failed.
        """
        self.check_fits(rows)
        scheduler = self.make_scheduler({row.prompt.uid for row in rows})
        self.records = []
        opened = self.open_executor(
            *(weights, scheduler, request),
            on_record=self.records.append,
            on_sample_done=self.on_sample_done,
        )
        with opened as run:
            yield from run.run_in_order(name_rows(rows))
            self._record_results(run, request)

    def check_fits(self, rows: Iterable[RolloutSequence]) -> None:
        """Raises InputError if a row does not fit into a slot."""
        for row in rows:
            self.workers[0].engine.check_fits(row)

    @contextmanager
    def open_executor(
        self,
        weights: DecodeWeights,
        scheduler: Scheduler,
        request: GenerationRequest,
        *,
        on_record: Callable[[EventRecord], None],
        on_sample_done: SampleDoneCallback | None = None,
    ) -> Iterator[RolloutExecutor]:
        """Opens a rollout on all available workers; on exit, waits for running segments.

        Args:
            on_record: called with every event and the commands that answered it.
            on_sample_done: called with every sample when it is done.

        Raises:
            RuntimeError: all workers stalled in earlier rollouts.
        """
        awake = self._available_workers()
        driver = (
            SequentialDriver() if self.schedule.single_thread else ThreadedDriver(awake, lease_s=self.schedule.lease_s)
        )
        with self._opened_workers(awake, driver, weights, request) as opened:
            # The workers have their own copies, and an open rollout outlives these weights by many versions.
            del weights
            start_s = self._clock()
            run = RolloutExecutor(
                scheduler,
                driver,
                opened,
                clock=lambda: self._clock() - start_s,
                unopened=[worker for worker in awake if worker not in opened],
                reopen=self._reopener(request),
                on_record=on_record,
                on_sample_done=on_sample_done,
                on_progress=self.on_progress,
                stop_requested=self.stop_requested,
                conversations=self.conversations,
            )
            with closing(run):
                yield run

    @contextmanager
    def _opened_workers(
        self, workers: Sequence[RolloutWorker], driver: WorkerDriver, weights: DecodeWeights, request: GenerationRequest
    ) -> Iterator[list[RolloutWorker]]:
        """Opens workers; on exit, closes the driver and the workers that are not stuck."""
        try:
            opened = _open_workers(workers, weights, request, suspends=self._suspends)
            del weights
            yield opened
        finally:
            try:
                self._stalled |= driver.close()
            finally:
                for worker in workers:
                    if worker not in self._stalled:
                        worker.close()

    def _available_workers(self) -> list[RolloutWorker]:
        """Returns all workers that are not stuck in a segment of an earlier rollout.

        Raises:
            RuntimeError: all workers are stuck.
        """
        for worker, thread in list(self._stalled.items()):
            if not thread.is_alive():
                worker.close()
                del self._stalled[worker]
        workers = [worker for worker in self.workers if worker not in self._stalled]
        if not workers:
            raise RuntimeError("every rollout worker is stuck in a segment of an earlier rollout; restart the run")
        return workers

    def _reopener(self, request: GenerationRequest) -> Reopen:
        def reopen(worker: RolloutWorker, weights: DecodeWeights, version: int) -> bool:
            try:
                worker.open(weights, replace(request, policy_version=version), suspends=self._suspends)
            except WORKER_FAILURES as failure:
                log.warning("rollout worker %s failed to open again: %s", worker.name, failure)
                worker.close()
                return False
            worker.name = worker.next_name
            return True

        return reopen

    def make_scheduler(self, prompts: Iterable[str] = ()) -> Scheduler:
        """Returns a new scheduler with the window of finished samples and the mean lengths of these prompts."""
        schedule, learned = self.schedule, self.learned_lengths
        return Scheduler(
            schedule.policy,
            pdsr=schedule.pdsr,
            segment=schedule.segment,
            rebuild="replay" if self.workers[0].engine.exact else "prefill",
            learned=learned.about(prompts),
            has_turns=self.conversations is not None,
            max_suspended=None if self.conversations is None else self.conversations.limits.max_suspended,
        )

    def _record_results(self, executor: RolloutExecutor, request: GenerationRequest) -> None:
        self.add_metrics(schedule_metrics(self.records))
        lengths: dict[str, list[int]] = {}
        for entry in executor.scheduler.samples:
            if entry.state is not SampleState.DONE:
                continue
            lengths.setdefault(entry.prompt, []).append(entry.num_tokens)
        means = {prompt: float(np.mean(known)) for prompt, known in lengths.items()}
        finished = () if request.is_evaluation else executor.scheduler.context.lengths.take_finished()
        self.record_lengths(LearnedLengths(means, finished))

    @property
    def learned_lengths(self) -> LearnedLengths:
        """What the rollouts so far have found out about lengths; the next schedule is based on it."""
        return self.shared_lengths.updated(self.new_lengths, window=self.schedule.pdsr.window)

    def record_lengths(self, newer: LearnedLengths) -> None:
        """Adds what a rollout, or a part of it, has found out about lengths."""
        self.new_lengths = self.new_lengths.updated(newer)

    def share_lengths(self, of_hosts: Iterable[LearnedLengths]) -> None:
        """Takes over the `new_lengths` of all hosts, this one included, in the same order on all of them."""
        newer = LearnedLengths.of_hosts(of_hosts)
        self.shared_lengths = self.shared_lengths.updated(newer, window=self.schedule.pdsr.window)
        self.new_lengths = NOTHING_LEARNED

    def take_counters(self) -> RolloutCounters:
        """Returns the counts of all workers since the last call."""
        return RolloutCounters.sum([worker.take_counters() for worker in self.workers])

    @property
    def engine(self) -> SlotEngine:
        """The engine of the worker with the largest cache."""
        return max((worker.engine for worker in self.workers), key=lambda engine: engine.programs.capacity)

    def footprint(self) -> Footprint:
        """Returns the arrays on the fullest device when all slots are full."""
        footprints = [worker.engine.footprint() for worker in self.workers]
        if self.workers[0].device is None:
            return max(footprints, key=bytes_per_device)
        weights, prompts, slots = zip(*footprints, strict=True)
        return Footprint(weights[0], sum(prompts, ()), sum(slots, ()))

    def shut_down(self) -> None:
        """Ends everything started outside this process. No rollout may follow."""

    def add_metrics(self, metrics: ScheduleMetrics) -> None:
        """Stores the metrics of a rollout, or of a part of one, until they are taken."""
        self._metrics.append(metrics)

    def take_schedule_metrics(self) -> list[ScheduleMetrics]:
        """Returns the metrics stored since the last call."""
        taken, self._metrics = self._metrics, []
        return taken


def _open_workers(
    workers: Sequence[RolloutWorker], weights: DecodeWeights, request: GenerationRequest, *, suspends: bool
) -> list[RolloutWorker]:
    """Opens workers and returns those that could be opened; see `RolloutWorker.open`.

    Raises:
        Exception: the error of the last worker, if no worker could be opened.
    """
    opened: list[RolloutWorker] = []
    for worker in workers:
        try:
            worker.open(weights, request, suspends=suspends)
        except WORKER_FAILURES as failure:
            if worker is workers[-1] and not opened:
                raise
            log.warning("this rollout starts without worker %s, which failed to open", worker.name, exc_info=failure)
        else:
            opened.append(worker)
    return opened
