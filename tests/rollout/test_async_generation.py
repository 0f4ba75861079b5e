"""Tests of an open rollout: rounds are completed in order while the weights change."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.model.decode_weights import DecodeWeights
from app.rollout.sequence import RolloutSequence, make_sequences
from app.rollout.workers.async_generation import AsyncRollout, CompletedRound
from app.rollout.workers.scheduler_loop import RolloutExecutor
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_pool import RolloutWorkerPool
from tests.rollout.scheduling.invariants import check_invariants
from tests.rollout.test_scheduled_workers import bits, dying, engine_on, expected, scheduled, workers_on
from tests.rollout.test_slot_engine import DEFINITION, GROUP_SIZE, LENGTHS, PROMPTS, REQUEST, weights_on
from tests.tiny import make_engine, make_mesh, random_params

KEY = REQUEST.policy_version
HALF = len(PROMPTS) // 2
"""Prompts of a round; two rounds have those of `expected`."""


def halves() -> list[list[RolloutSequence]]:
    rows = make_sequences(PROMPTS, REQUEST, noise_step=KEY)
    return [rows[: HALF * GROUP_SIZE], rows[HALF * GROUP_SIZE :]]


class ByHand(AsyncRollout):
    """An open rollout that a test drives in place of its thread."""

    def __init__(self, made: RolloutWorkerPool, weights: DecodeWeights | None = None):
        super().__init__(made, weights_on() if weights is None else weights, REQUEST)
        self.done: list[CompletedRound] = []
        self._executor.add_workers()

    def _run_thread(self) -> None:
        pass

    @property
    def run(self) -> RolloutExecutor:
        return self._executor

    @property
    def num_begun(self) -> int:
        return self._num_begun

    def begin(self, rows: list[RolloutSequence]) -> None:
        self._waiting.append(rows)
        self._begin_rounds()

    def advance(self) -> None:
        self._advance()
        while self.num_ready:
            done = self._outbox.get()
            assert isinstance(done, CompletedRound)
            self.done.append(done)

    def finish(self, num_rounds: int) -> None:
        while len(self.done) < num_rounds:
            self.advance()

    @property
    def rows(self) -> list[RolloutSequence]:
        return [row for done in self.done for row in done.rows]


def samples_of(made: RolloutWorkerPool, rows: Sequence[RolloutSequence]):
    return [made.to_sample(row, i // GROUP_SIZE, REQUEST) for i, row in enumerate(rows)]


@pytest.mark.parametrize("policy", ["pdsr_v2", "adaptive"])
def test_rounds_come_out_in_order_with_the_samples_of_a_closed_rollout(policy: str) -> None:
    made = scheduled(workers_on(2), policy, in_turn=True)
    with closing(ByHand(made)) as one:
        for rows in halves():
            one.begin(rows)
        one.finish(2)
        assert bits(samples_of(made, one.rows)) == bits(expected())
        assert not one.run.is_busy
        scheduler = one.run.scheduler
        assert not list(scheduler.samples) and not one.run._rows
        check_invariants(scheduler)
    assert not any(worker.engine.active_rows for worker in made.workers)


def test_a_round_is_begun_once_nobody_of_the_one_before_waits() -> None:
    with closing(ByHand(scheduled(workers_on(1), in_turn=True))) as one:
        first, second = halves()
        one.begin(first)
        one.begin(second)
        assert one.num_begun == 1
        while one.num_begun == 1:
            assert one.run.scheduler.samples.num_waiting > 0
            one.advance()
        assert any(row.finish_reason is None for row in first), "its last samples still run"
        one.finish(2)


def other_weights(seed: int) -> DecodeWeights:
    return make_engine(DEFINITION).to_decode_weights(random_params(DEFINITION, seed=seed))


def test_each_token_tells_which_weights_drew_it() -> None:
    made = scheduled(workers_on(1), in_turn=True)
    with closing(ByHand(made)) as one:
        (first, second) = halves()
        one.begin(first)
        one.advance()
        before = {row.uid: row.num_tokens for row in first}
        one.run.publish(other_weights(1), policy_version=KEY + 1)
        # A segment may have begun before.
        one.advance()
        begun = {row.uid: row.num_tokens for row in first}
        assert begun != before
        one.begin(second)
        one.finish(2)
    samples = samples_of(made, one.rows)
    of_older = {row.uid: sum(count for version, count in row.segment_versions if version == KEY) for row in first}
    assert of_older in (before, begun)
    for sample in samples[: len(first)]:
        drawn = of_older[sample.uid]
        assert sample.token_versions.tolist() == [KEY] * drawn + [KEY + 1] * (len(sample.completion_ids) - drawn)
        assert sample.policy_version == (KEY if drawn else KEY + 1)
        assert (sample.policy_versions is None) == (drawn in (0, len(sample.completion_ids)))
    assert any(s.policy_versions is not None for s in samples)
    assert {s.policy_version for s in samples[len(first) :]} == {KEY + 1}
    whole = zip(samples, expected(), strict=True)
    same = [np.array_equal(ours.completion_ids, theirs.completion_ids) for ours, theirs in whole]
    assert all(same[i] for i, s in enumerate(samples) if s.policy_version == KEY and s.policy_versions is None)
    assert not all(same)


def test_only_the_newest_weights_are_loaded() -> None:
    made = scheduled(workers_on(1), in_turn=True)
    with closing(ByHand(made)) as one:
        one.begin(halves()[0])
        for version in (KEY + 1, KEY + 2):
            one.run.publish(weights_on(), policy_version=version)
        one.finish(1)
    versions = {version for row in one.rows for version, _ in row.segment_versions}
    # The first segment may have begun before.
    assert versions - {KEY} == {KEY + 2}
    # They are the same weights, and the noise is that of the step that asked.
    assert bits(samples_of(made, one.rows)) == bits(expected()[: HALF * GROUP_SIZE])


def test_windows_add_up_to_what_was_generated() -> None:
    with closing(ByHand(scheduled(workers_on(2), in_turn=True))) as one:
        for rows in halves():
            one.begin(rows)
        one.finish(2)
    windows = [done.metrics for done in one.done]
    assert sum(found.useful_tokens for found in windows) == sum(LENGTHS)
    assert all(found.makespan_s > 0 and 0 <= found.bubble <= 1 and np.isnan(found.tail_fraction) for found in windows)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_published_weights_outlive_the_state_that_they_were_made_of(dtype: str) -> None:
    engine = make_engine(DEFINITION, dtype=jnp.dtype(dtype))
    params = jax.device_put(random_params(DEFINITION), make_mesh().devices.item())
    weights = engine.to_decode_weights(params)
    again = jax.tree.map(np.asarray, weights)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x - 1, tree), donate_argnums=0)
    jax.block_until_ready(update(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, weights), again)


def generation_of(made: RolloutWorkerPool) -> AsyncRollout:
    return AsyncRollout(made, weights_on(), replace(REQUEST, max_new_tokens=LENGTHS[: HALF * GROUP_SIZE]))


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_thread_generates_while_others_do_something_else(in_turn: bool) -> None:
    made = scheduled(workers_on(2), in_turn=in_turn)
    generation = generation_of(made)
    for _ in range(3):
        generation.submit(PROMPTS[:HALF], noise_step=KEY)
    rounds = [generation.collect_round() for _ in range(2)]
    generation.close()
    assert not generation._thread.is_alive()
    first = bits(expected()[: HALF * GROUP_SIZE])
    assert [bits(samples) for samples in rounds] == [first, first]
    assert len(made.take_schedule_metrics()) == 2
    assert bits(made.generate(weights_on(), PROMPTS, REQUEST)) == bits(expected())


def test_a_device_has_no_third_copy_of_the_weights() -> None:
    worker = RolloutWorker("fast-0", "fast", engine_on(0))
    worker.open(weights_on(), REQUEST, suspends=False)
    copies = [jax.tree.map(jnp.copy, weights_on()) for _ in range(3)]
    queued = []
    for version, weights in enumerate(copies):
        worker.queue_weights(weights, policy_version=version)
        queued.append(weakref.ref(jax.tree.leaves(worker._queued_weights[0][0])[0]))
    del copies, weights
    gc.collect()
    assert [leaf() is not None for leaf in queued] == [False, False, True]
    worker.close()


def test_an_error_of_a_worker_surfaces_where_samples_are_taken() -> None:
    worker = RolloutWorker("fast-0", "fast", engine_on(0))
    generation = generation_of(scheduled([worker]))
    with dying(worker, lives=1, error=RuntimeError("the device is gone")):
        generation.submit(PROMPTS[:HALF], noise_step=KEY)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is gone"):
                generation.collect_round()
    generation.close()
    assert not generation._thread.is_alive()


def test_weights_go_when_the_next_are_loaded() -> None:
    made = scheduled(workers_on(1), in_turn=True)
    first = jax.tree.map(jnp.copy, weights_on())
    leaves = [weakref.ref(leaf) for leaf in jax.tree.leaves(first)]
    with closing(ByHand(made, first)) as one:
        del first
        one.begin(halves()[0])
        one.advance()
        one.run.publish(weights_on(), policy_version=KEY + 1)
        one.advance()
        gc.collect()
        assert not any(leaf() is not None for leaf in leaves)


def test_lengths_are_known_to_the_next_generation() -> None:
    made = scheduled(workers_on(1), in_turn=True)
    with closing(generation_of(made)) as first:
        first.submit(PROMPTS[:HALF], noise_step=KEY)
        samples = first.collect_round()
    assert made.learned_lengths.prompts.keys() == {prompt.uid for prompt in PROMPTS[:HALF]}
    of_first = [len(s.completion_ids) for s in samples if s.prompt.uid == PROMPTS[0].uid]
    assert made.learned_lengths.prompts[PROMPTS[0].uid] == np.mean(of_first)
    assert sorted(tokens for tokens, _ in made.learned_lengths.finished) == sorted(
        len(s.completion_ids) for s in samples
    )
    assert made.make_scheduler(made.learned_lengths.prompts).context.lengths.has_estimate(PROMPTS[0].uid)


def test_a_sample_without_a_token_is_of_the_version_that_dropped_it() -> None:
    row = RolloutSequence(PROMPTS[0], 0, max_new_tokens=4, noise_step=57, finish_reason="dropped:non-finite logits")
    row.segment_versions, row.segment_tokens = [(3, 0)], [np.zeros((3, 0), np.int32)]
    assert row.to_sample(0, REQUEST, decode_text=str).policy_version == 3
