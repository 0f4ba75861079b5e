"""Generation that goes on while others train: rounds of prompts come in, new weights at any time, rounds go out.

Rows stay in their slots when the weights change and go on with the caches they have, so that one sample may be drawn
by several versions. Source: Piché et al. 2025 (PipelineRL).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple

import jax

from app.model.kv_cache import DecodeWeights
from app.records.sample import Prompt, Sample
from app.rollout.executor import RolloutExecutor
from app.rollout.generator import make_sequences
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.metrics import ScheduleMetrics, ScheduleMetricsTracker
from app.rollout.sequence import RolloutSequence
from app.rollout.worker_pool import RolloutWorkerPool
from app.rollout.workers import CLOSE_TIMEOUT_S

log = logging.getLogger(__name__)


class CompletedRound(NamedTuple):
    """All rows of a round."""

    rows: list[RolloutSequence]
    mean_lengths: dict[str, float]
    """Prompt -> mean length of its samples."""
    metrics: ScheduleMetrics
    """Of what all workers did since the round before was done."""


class RoundExecutor:
    """One rollout without an end. One thread drives it.

    A round is given to the scheduler when no sample of the rounds before it waits: older rounds come first whatever
    the policy, and the next one fills the slots that their last samples leave.
    """

    def __init__(self, executor: RolloutExecutor, metrics: ScheduleMetricsTracker):
        self._executor = executor
        self._metrics = metrics
        self._waiting: deque[dict[str, RolloutSequence]] = deque()
        self._in_flight: deque[list[str]] = deque()
        self._num_submitted = 0
        executor.add_workers()

    @property
    def is_busy(self) -> bool:
        """Whether anybody decodes."""
        return self._executor.is_busy

    def submit(self, rows: Sequence[RolloutSequence]) -> None:
        """The next round."""
        # The same prompt may be in several rounds at once.
        self._waiting.append({f"{row.uid}@{self._num_submitted}": row for row in rows})
        self._num_submitted += 1
        self._submit_next_rounds()

    def advance(self) -> None:
        """To the next edge of a segment; see `Run.advance`."""
        self._executor.advance()
        self._submit_next_rounds()

    def _submit_next_rounds(self) -> None:
        while self._waiting and self._executor.scheduler.samples.num_waiting == 0:
            rows = self._waiting.popleft()
            self._in_flight.append(list(rows))
            self._executor.submit(rows)

    def completed_rounds(self) -> Iterator[CompletedRound]:
        """Rounds that are done, each once, in the order in which they were submitted."""
        while self._in_flight and all(map(self._executor.is_done, self._in_flight[0])):
            found = self._metrics.take_window()
            rows = self._executor.release(self._in_flight.popleft())
            history = self._executor.scheduler.context.lengths.history
            yield CompletedRound(
                rows, {uid: history[uid] for uid in (row.prompt.uid for row in rows) if uid in history}, found
            )


class AsyncRollout:
    """An open rollout with a thread of its own. Whoever trains submits, publishes and takes.

    Args:
        weights: of the policy that draws first.

    Raises:
        RuntimeError: all workers sleep.
    """

    def __init__(
        self,
        workers: RolloutWorkerPool,
        weights: DecodeWeights,
        *,
        group_size: int,
        max_new_tokens: int | Sequence[int],
        rules: SamplingRules,
        seed: int,
        policy_version: int,
    ):
        self._workers = workers
        self._group_size = group_size
        self._max_new_tokens = max_new_tokens
        self._truncates = rules.truncates
        self._inbox: SimpleQueue[Sequence[RolloutSequence] | None] = SimpleQueue()
        self._outbox: SimpleQueue[CompletedRound | BaseException] = SimpleQueue()
        tally = ScheduleMetricsTracker()
        with ExitStack() as stack:
            scheduler = workers.make_scheduler(workers.length_history)
            opened = workers.open_executor(
                weights, scheduler, rules=rules, seed=seed, policy_version=policy_version, on_record=tally.add
            )
            self._executor = stack.enter_context(opened)
            self._rounds = RoundExecutor(self._executor, tally)
            self._exit_stack = stack.pop_all()
        # A daemon: a device that never comes back must not keep the program from ending.
        self._thread = Thread(target=self._run_thread, name="generation", daemon=True)
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], *, noise_step: int) -> None:
        """The next round.

        Raises:
            InputError: a prompt that no slot has room for.
        """
        rows = make_sequences(
            prompts, group_size=self._group_size, max_new_tokens=self._max_new_tokens, noise_step=noise_step
        )
        self._workers.check_fits(rows)
        self._inbox.put(rows)
        self._executor.wake()

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Segments that begin from now on are drawn by these weights."""
        # An update may still compute them: segments go on with the last ones until it has.
        jax.block_until_ready(weights)
        self._executor.publish(weights, policy_version=policy_version)

    def collect_round(self, *, first_group_id: int = 0) -> list[Sample]:
        """Of the oldest round that was not taken, once it is done.

        Raises:
            StoppedError: asked to stop before it was done.
            Exception: what the generation has failed with.
        """
        done = self._outbox.get()
        if isinstance(done, BaseException):
            self._outbox.put(done)
            raise done
        self._workers.add_metrics(done.metrics)
        self._workers.record_lengths(done.mean_lengths)
        return [
            self._workers.to_sample(row, first_group_id + number // self._group_size, truncates=self._truncates)
            for number, row in enumerate(done.rows)
        ]

    def close(self) -> None:
        """Stops at the edges of the segments that run, or after `LAST_SEGMENT_S`. What was not taken is lost."""
        self._inbox.put(None)
        self._executor.wake()
        self._thread.join(CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            log.warning("generation is left in a segment that does not end")
        else:
            self._exit_stack.close()

    def _run_thread(self) -> None:
        try:
            while self._receive_rounds():
                self._rounds.advance()
                for done in self._rounds.completed_rounds():
                    self._outbox.put(done)
        except BaseException as error:
            self._outbox.put(error)

    def _receive_rounds(self) -> bool:
        """Takes in what was submitted, and waits for it where nobody decodes. False once it is closed."""
        while True:
            try:
                rows = self._inbox.get(block=not self._rounds.is_busy)
            except Empty:
                return True
            if rows is None:
                return False
            self._rounds.submit(rows)
