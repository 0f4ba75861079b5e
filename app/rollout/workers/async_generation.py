"""Asynchronous generation: rounds of prompts are submitted and collected while training continues.

When the weights change, rows stay in their slots and keep their caches, so a sample may contain tokens of several
policy versions. Source: Piché et al. 2025 (PipelineRL).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

import jax

from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt, Sample
from app.rollout.request import GenerationRequest
from app.rollout.scheduling.length_estimator import LearnedLengths
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics, ScheduleMetricsTracker
from app.rollout.sequence import RolloutSequence
from app.rollout.workers.worker_pool import RolloutWorkerPool
from app.rollout.workers.worker_threads import join_or_abandon


class CompletedRound(NamedTuple):
    """Rows, lengths and metrics of a completed round."""

    rows: list[RolloutSequence]
    lengths: LearnedLengths
    """Mean sample length of each of its prompts, and lengths of all samples finished since the previous round."""
    metrics: ScheduleMetrics
    """Metrics of all workers since the previous round was completed."""


class AsyncRollout:
    """A rollout in its own thread. The training thread submits rounds, publishes weights and collects samples.

    A round is passed to the scheduler once no sample of an earlier round is waiting. Earlier rounds thus come first
    under every policy, and the next round fills the slots freed by their last samples.

    Args:
        weights: initial weights of the policy.
    """

    def __init__(self, workers: RolloutWorkerPool, weights: DecodeWeights, request: GenerationRequest):
        self._workers = workers
        self._request = request
        self._inbox: SimpleQueue[Sequence[RolloutSequence] | None] = SimpleQueue()
        self._outbox: SimpleQueue[CompletedRound | BaseException] = SimpleQueue()
        self._waiting: deque[Sequence[RolloutSequence]] = deque()
        self._in_flight: deque[list[str]] = deque()
        """Names of the rows of each round in the scheduler, oldest round first."""
        self._num_begun = 0
        self._metrics, self._exit_stack = ScheduleMetricsTracker(), ExitStack()
        prompts = workers.learned_lengths.prompts
        opened = workers.open_executor(weights, request, prompts=prompts, on_record=self._metrics.add)
        self._executor = self._exit_stack.enter_context(opened)
        # A daemon thread, because a device call that never returns must not keep a failed program alive.
        self._thread = Thread(target=self._run_thread, name="generation", daemon=True)
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], *, noise_step: int) -> None:
        """Adds a round with `group_size` samples of each prompt.

        Args:
            noise_step: policy version for the PRNG keys of the samples.

        Raises:
            InputError: a prompt does not fit into a slot.
        """
        self._inbox.put(self._workers.make_rows(prompts, self._request, noise_step=noise_step))
        self._executor.wake()

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Sets the weights for all segments that start from now on."""
        # An update may still be computing the weights; until it is done, segments use the previous ones.
        jax.block_until_ready(weights)
        self._executor.publish(weights, policy_version=policy_version)

    def collect_round(self, *, first_group_id: int = 0) -> list[Sample]:
        """Waits until the oldest uncollected round is complete and returns its samples.

        Raises:
            StoppedError: a stop was requested before the round was complete.
            Exception: the error that ended generation.
        """
        done = self._outbox.get()
        if isinstance(done, BaseException):
            self._outbox.put(done)
            raise done
        self._workers.store_metrics(done.metrics)
        self._workers.record_lengths(done.lengths)
        return [
            self._workers.to_sample(row, first_group_id + number // self._request.group_size, self._request)
            for number, row in enumerate(done.rows)
        ]

    @property
    def num_ready(self) -> int:
        """Number of complete rounds that are not yet collected."""
        return self._outbox.qsize()

    def close(self) -> None:
        """Stops generation after the running segments, or after `CLOSE_TIMEOUT_S`. Uncollected rounds are lost."""
        self._inbox.put(None)
        self._executor.wake()
        if join_or_abandon(self._thread):
            self._exit_stack.close()

    def _run_thread(self) -> None:
        try:
            self._executor.add_workers()
            while self._receive_rounds():
                self._advance()
        except BaseException as error:
            self._outbox.put(error)

    def _receive_rounds(self) -> bool:
        """Receives submitted rounds; waits for one if no sample is in progress. Returns False after `close`."""
        while True:
            try:
                rows = self._inbox.get(block=not self._executor.is_busy)
            except Empty:
                return True
            if rows is None:
                return False
            self._waiting.append(rows)
            self._begin_rounds()

    def _begin_rounds(self) -> None:
        while self._waiting and self._executor.scheduler.samples.num_waiting == 0:
            # Several open rounds may contain the same prompt.
            self._in_flight.append(self._executor.submit(self._waiting.popleft(), suffix=f"@{self._num_begun}"))
            self._num_begun += 1

    def _advance(self) -> None:
        """Waits for the end of a segment, then puts complete rounds into the outbox, in order."""
        self._executor.advance()
        self._begin_rounds()
        lengths = self._executor.scheduler.context.lengths
        while self._in_flight and all(map(self._executor.is_done, self._in_flight[0])):
            metrics = self._metrics.take_window()
            rows = self._executor.release(self._in_flight.popleft())
            learned = LearnedLengths(lengths.history, lengths.take_finished())
            self._outbox.put(CompletedRound(rows, learned.about(row.prompt.uid for row in rows), metrics))
