"""Generation on several workers, to which a scheduler assigns samples."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from app.mesh.placement import bytes_per_device
from app.model.decode_weights import DecodeWeights
from app.rollout.counters import RolloutCounters
from app.rollout.engine.sample_generator import SampleGenerator
from app.rollout.engine.shapes import Footprint
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.length_estimator import NOTHING_LEARNED, LearnedLengths
from app.rollout.scheduling.protocol import EventRecord
from app.rollout.scheduling.sample_states import SampleState
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics, schedule_metrics
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import DecodeText, RolloutSequence
from app.rollout.workers.scheduler_loop import ProgressCallback, RolloutExecutor, SampleDoneCallback
from app.rollout.workers.worker import RolloutWorker, WorkerDiedError
from settings.schema.rollout import PdsrSettings, SegmentSettings


@dataclass(frozen=True)
class ScheduleConfig:
    """How samples are assigned to workers."""

    policy: str
    """Name of the scheduling policy, in `POLICIES`."""
    pdsr: PdsrSettings
    segment: SegmentSettings
    in_order: bool
    """Whether segments are handled in start order, so that a repeated run gives the same commands."""


class RolloutWorkerPool(SampleGenerator):
    """Generates samples on workers, to which a scheduler assigns them.

    Args:
        workers: at least one worker; in exact mode, all need the same number of devices and the same
            `SlotShapes.rows_together`.
    """

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: DecodeText,
        stop_text: DecodeText,
    ):
        engines = [worker.engine for worker in workers]
        largest = max(engines, key=lambda engine: engine.programs.capacity)
        super().__init__(largest, decode_text=decode_text, stop_text=stop_text)
        self.workers = tuple(workers)
        self.schedule = schedule
        self.records: list[EventRecord] = []
        """Events of the last rollout, with the commands that answered them."""
        self.on_sample_done: SampleDoneCallback | None = None
        self.on_progress: ProgressCallback | None = None
        self.shared_lengths = NOTHING_LEARNED
        """Length statistics of all hosts, as of the last `share_lengths`."""
        self.new_lengths = NOTHING_LEARNED
        """Length statistics of this host since the last `share_lengths`."""
        self._metrics: list[ScheduleMetrics] = []

    @property
    def _suspends(self) -> bool:
        """Whether samples may leave their slots before they are done."""
        return self.schedule.policy != "sync" or len(self.workers) > 1

    def compile(self, rules: SamplingRules) -> None:
        """Compiles the programs of all workers."""
        for worker in self.workers:
            worker.compile(rules, suspends=self._suspends)
        for worker in self.workers:
            worker.wait_until_ready(self.stop_requested)

    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        self.records = []
        prompts = {row.prompt.uid for row in rows}
        with self.open_executor(weights, request, prompts=prompts, on_record=self.records.append) as run:
            yield from run.run_in_order(rows)
            self._record_results(run, request)

    @contextmanager
    def open_executor(
        self,
        weights: DecodeWeights,
        request: GenerationRequest,
        *,
        prompts: Iterable[str],
        on_record: Callable[[EventRecord], None],
    ) -> Iterator[RolloutExecutor]:
        """Returns a context manager for a rollout on all live workers; on exit, it waits for running segments.

        Args:
            prompts: uids of prompts whose sample lengths in earlier rollouts are used.
            on_record: called with every event and the commands that answered it.

        Raises:
            WorkerDiedError: all workers have died in earlier rollouts.
        """
        workers = [worker for worker in self.workers if not worker.is_lost]
        if not workers:
            raise WorkerDiedError(
                "every rollout worker has died; see the log, and run the command again (grpo train with --resume auto)"
            )
        run = RolloutExecutor(
            self.make_scheduler(prompts),
            workers,
            in_order=self.schedule.in_order,
            on_record=on_record,
            on_sample_done=self.on_sample_done,
            on_progress=self.on_progress,
            stop_requested=self.stop_requested,
            conversations=self.conversations,
        )
        try:
            for worker in workers:
                worker.wait_until_ready(self.stop_requested)
                worker.open(weights, request, suspends=self._suspends)
            # The workers have their own copies, and an open rollout outlives these weights by many versions.
            del weights
            yield run
        finally:
            run.close()
            for worker in workers:
                worker.close()

    def make_scheduler(self, prompts: Iterable[str] = ()) -> Scheduler:
        """Returns a new scheduler that knows the lengths of recent samples and each prompt's mean sample length."""
        schedule, learned = self.schedule, self.learned_lengths
        return Scheduler(
            schedule.policy,
            pdsr=schedule.pdsr,
            segment=schedule.segment,
            learned=learned.about(prompts),
            has_turns=self.conversations is not None,
            max_suspended=None if self.conversations is None else self.conversations.limits.max_suspended,
        )

    def _record_results(self, executor: RolloutExecutor, request: GenerationRequest) -> None:
        self.store_metrics(schedule_metrics(self.records))
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
        """Length statistics of earlier rollouts, used by the next schedule."""
        return self.shared_lengths.updated(self.new_lengths, window=self.schedule.pdsr.window)

    def record_lengths(self, newer: LearnedLengths) -> None:
        """Adds the length statistics of a rollout or a part of it."""
        self.new_lengths = self.new_lengths.updated(newer)

    def share_lengths(self, of_hosts: Iterable[LearnedLengths]) -> None:
        """Adds the `new_lengths` of all hosts to `shared_lengths`; all hosts must pass them in the same order."""
        newer = LearnedLengths.of_hosts(of_hosts)
        self.shared_lengths = self.shared_lengths.updated(newer, window=self.schedule.pdsr.window)
        self.new_lengths = NOTHING_LEARNED

    def take_counters(self) -> RolloutCounters:
        """Returns the counts of all workers since the last call."""
        return RolloutCounters.sum([worker.take_counters() for worker in self.workers])

    def footprint(self) -> Footprint:
        """Returns the arrays of the worker with the most bytes per device, or of all workers if they share devices."""
        footprints = [worker.engine.footprint() for worker in self.workers]
        if self.workers[0].device is None:
            return max(footprints, key=bytes_per_device)
        weights, slots = zip(*footprints, strict=True)
        return Footprint(weights[0], sum(slots, ()))

    def shut_down(self) -> None:
        """Ends the processes that the workers started, if any. No rollout may follow."""
        for worker in self.workers:
            worker.shut_down()

    def store_metrics(self, metrics: ScheduleMetrics) -> None:
        """Stores the metrics of a rollout or a part of it, for `take_schedule_metrics`."""
        self._metrics.append(metrics)

    def take_schedule_metrics(self) -> list[ScheduleMetrics]:
        """Returns the metrics stored since the last call."""
        taken, self._metrics = self._metrics, []
        return taken
