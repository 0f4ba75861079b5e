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
from app.rollout.executor import Run
from app.rollout.generator import rows_of
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.event_log import Begun
from app.rollout.scheduling.metrics import Figures, FigureTally
from app.rollout.sequence import Row
from app.rollout.worker_pool import ScheduledWorkers
from app.rollout.workers import LAST_SEGMENT_S

log = logging.getLogger(__name__)


class Done(NamedTuple):
    """All rows of a round."""

    rows: list[Row]
    lengths: dict[str, float]
    """Prompt -> mean length of its samples."""
    figures: Figures
    """Of what all workers did since the round before was done."""


class OpenRollout:
    """One rollout without an end. One thread drives it.

    A round is given to the scheduler when no sample of the rounds before it waits: older rounds come first whatever
    the policy, and the next one fills the slots that their last samples leave.
    """

    def __init__(self, run: Run, tally: FigureTally):
        self._run = run
        self._tally = tally
        self._waiting: deque[dict[str, Row]] = deque()
        self._given: deque[list[str]] = deque()
        self._num_submitted = 0
        run.join()

    @property
    def is_busy(self) -> bool:
        """Whether anybody decodes."""
        return self._run.is_busy

    def submit(self, rows: Sequence[Row]) -> None:
        """The next round."""
        # The same prompt may be in several rounds at once.
        self._waiting.append({f"{row.uid}@{self._num_submitted}": row for row in rows})
        self._num_submitted += 1
        self._give()

    def advance(self) -> None:
        """To the next edge of a segment; see `Run.advance`."""
        self._run.advance()
        self._give()

    def _give(self) -> None:
        while self._waiting and self._run.scheduler.ledger.num_waiting == 0:
            rows = self._waiting.popleft()
            self._given.append(list(rows))
            self._run.submit(rows)

    def taken(self) -> Iterator[Done]:
        """Rounds that are done, each once, in the order in which they were submitted."""
        while self._given and all(map(self._run.is_done, self._given[0])):
            found = self._tally.window()
            rows = self._run.release(self._given.popleft())
            history = self._run.scheduler.context.lengths.history
            yield Done(rows, {uid: history[uid] for uid in (row.prompt.uid for row in rows) if uid in history}, found)


class Generation:
    """An open rollout with a thread of its own. Whoever trains submits, publishes and takes.

    Args:
        weights: of the policy that draws first.

    Raises:
        RuntimeError: all workers sleep.
    """

    def __init__(
        self,
        workers: ScheduledWorkers,
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
        self._inbox: SimpleQueue[Sequence[Row] | None] = SimpleQueue()
        self._outbox: SimpleQueue[Done | BaseException] = SimpleQueue()
        tally = FigureTally()
        with ExitStack() as stack:
            begun = Begun.now(workers.scheduler(workers.history))
            opened = workers.opened(
                weights, begun, rules=rules, seed=seed, policy_version=policy_version, tell=tally.add
            )
            self._run = stack.enter_context(opened)
            self._rollout = OpenRollout(self._run, tally)
            self._opened = stack.pop_all()
        # A daemon: a device that never comes back must not keep the program from ending.
        self._thread = Thread(target=self._serve, name="generation", daemon=True)
        self._thread.start()

    def submit(self, prompts: Sequence[Prompt], *, noise_step: int) -> None:
        """The next round.

        Raises:
            InputError: a prompt that no slot has room for.
        """
        rows = rows_of(prompts, group_size=self._group_size, max_new_tokens=self._max_new_tokens, noise_step=noise_step)
        self._workers.check(rows)
        self._inbox.put(rows)
        self._run.wake()

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Segments that begin from now on are drawn by these weights."""
        # An update may still compute them: segments go on with the last ones until it has.
        jax.block_until_ready(weights)
        self._run.publish(weights, policy_version=policy_version)

    def take(self, *, first_group_id: int = 0) -> list[Sample]:
        """Of the oldest round that was not taken, once it is done.

        Raises:
            StoppedError: asked to stop before it was done.
            Exception: what the generation has failed with.
        """
        done = self._outbox.get()
        if isinstance(done, BaseException):
            self._outbox.put(done)
            raise done
        self._workers.note(done.figures)
        self._workers.learn(done.lengths)
        return [
            self._workers.sample_of(row, first_group_id + number // self._group_size, truncates=self._truncates)
            for number, row in enumerate(done.rows)
        ]

    def close(self) -> None:
        """Stops at the edges of the segments that run, or after `LAST_SEGMENT_S`. What was not taken is lost."""
        self._inbox.put(None)
        self._run.wake()
        self._thread.join(LAST_SEGMENT_S)
        if self._thread.is_alive():
            log.warning("generation is left in a segment that does not end")
        else:
            self._opened.close()

    def _serve(self) -> None:
        try:
            while self._goes_on():
                self._rollout.advance()
                for done in self._rollout.taken():
                    self._outbox.put(done)
        except BaseException as error:
            self._outbox.put(error)

    def _goes_on(self) -> bool:
        """Takes in what was submitted, and waits for it where nobody decodes. False once it is closed."""
        while True:
            try:
                rows = self._inbox.get(block=not self._rollout.is_busy)
            except Empty:
                return True
            if rows is None:
                return False
            self._rollout.submit(rows)
