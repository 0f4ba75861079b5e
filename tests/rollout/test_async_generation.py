"""Tests open rollouts, whose rounds are completed in order while the weights change, and stopped rollouts."""

import gc
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import jax
import numpy as np
import pytest

from app.distributed.stop_check import StoppedError, never_stop
from app.rollout.scheduling.protocol import RunSegment
from app.rollout.scheduling.sample_states import ENDED, SampleState, SampleTable
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence
from app.rollout.workers.async_generation import AsyncRollout
from app.rollout.workers.worker import Admission, RolloutWorker
from app.rollout.workers.worker_pool import RolloutWorkerPool
from tests.rollout import slots
from tests.rollout.worker_pools import bits, dying, engine_on, expected, samples_of, scheduled, workers_on
from tests.tiny import TinyEngine, make_mesh, random_params

KEY = slots.REQUEST.policy_version
HALF = len(slots.PROMPTS) // 2
"""Number of prompts in a round."""
SAMPLES = HALF * slots.GROUP_SIZE


def generation_of(made: RolloutWorkerPool) -> AsyncRollout:
    return AsyncRollout(made, slots.weights_on(), replace(slots.REQUEST, max_new_tokens=slots.LENGTHS[:SAMPLES]))


def has_thread() -> bool:
    return any(thread.name == "generation" for thread in threading.enumerate())


@pytest.mark.parametrize(("policy", "in_turn"), [("pdsr_v2", True), ("adaptive", False)])
def test_rounds_are_collected_in_order_with_the_samples_of_a_closed_rollout(policy: str, in_turn: bool) -> None:
    made, begun = scheduled(workers_on(2), policy, in_turn=in_turn), dict[str, bool]()

    def watch(table: SampleTable) -> None:
        newest = max((entry.uid.rpartition("@")[2] for entry in table), default="")
        begun.setdefault(newest, any(one.state is SampleState.NEW for one in table if not one.uid.endswith(newest)))

    made.on_progress = watch
    others = slots.PROMPTS[HALF : 2 * HALF]
    with closing(generation_of(made)) as generation:
        # Several open rounds may contain the same prompt; the last one is never collected.
        for prompts in (slots.PROMPTS[:HALF], others, slots.PROMPTS[:HALF], others):
            generation.submit(prompts, noise_step=KEY)
        rounds = [bits(generation.collect_round(first_group_id=10 * i)) for i in range(3)]
        assert has_thread()
    assert made.learned_lengths.prompts.keys() >= {prompt.uid for prompt in slots.PROMPTS[:HALF]}
    assert len(made.learned_lengths.finished) >= 3 * SAMPLES, "for the next rollout"
    assert not has_thread() and not any(worker.engine.active_rows for worker in made.workers)
    first, second = (
        bits(slots.generate(slots.slots_of(True), prompts, slots.LENGTHS[:SAMPLES]))
        for prompts in (slots.PROMPTS[:HALF], others)
    )
    for number, (found, wanted) in enumerate(zip(rounds, (first, second, first), strict=True)):
        assert found == [(uid, group + 10 * number, *rest) for uid, group, *rest in wanted]
    assert not any(begun.values()), "a round begins once no sample of earlier rounds waits"
    assert begun.keys() >= {"0", "1", "2", "3"}
    windows = made.take_schedule_metrics()
    assert len(windows) == 3
    assert all(found.makespan_s > 0 and 0 <= found.bubble <= 1 and np.isnan(found.tail_fraction) for found in windows)
    assert bits(made.generate(slots.weights_on(), slots.PROMPTS, slots.REQUEST)) == bits(expected())


def test_each_token_records_its_policy_version() -> None:
    made = scheduled(workers_on(1), in_turn=True)
    published: list[int] = []

    def publish(table: SampleTable) -> None:
        if not published and sum(entry.state in ENDED for entry in table) >= 4:
            published.append(KEY + 1)
            generation.publish(slots.weights_on(seed=1), policy_version=KEY + 1)

    made.on_progress = publish
    generation = AsyncRollout(made, slots.weights_on(), slots.REQUEST)
    with closing(generation):
        generation.submit(slots.PROMPTS, noise_step=KEY)
        samples = generation.collect_round()
    kinds = set()
    for sample, whole in zip(samples, expected(), strict=True):
        versions, length = sample.token_policy_versions.tolist(), len(sample.completion_ids)
        drawn = versions.count(KEY)
        assert versions == [KEY] * drawn + [KEY + 1] * (length - drawn)
        np.testing.assert_array_equal(sample.completion_ids[:drawn], whole.completion_ids[:drawn])
        assert sample.policy_version == (KEY if drawn else KEY + 1)
        assert (sample.policy_versions is None) == (drawn in (0, length))
        kinds.add((drawn > 0, drawn < length))
    assert kinds == {(True, False), (True, True), (False, True)}, "samples of both versions, and of each alone"
    assert any(not np.array_equal(a.completion_ids, b.completion_ids) for a, b in zip(samples, expected(), strict=True))


def test_decode_weights_remain_valid_after_the_training_state_is_donated() -> None:
    params = jax.device_put(random_params(slots.DEFINITION), make_mesh().devices.item())
    weights = TinyEngine(slots.DEFINITION).to_decode_weights(params)
    before = jax.tree.map(np.asarray, weights)
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x - 1, tree), donate_argnums=0)
    jax.block_until_ready(update(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(params))
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, weights), before)


def test_a_device_holds_at_most_two_versions_of_weights_and_loads_the_newest() -> None:
    worker, device = RolloutWorker("fast-0", "fast", engine_on(1, True)), jax.devices()[1]

    def num_arrays() -> int:
        gc.collect()
        return sum(array.devices() == {device} for array in jax.live_arrays())

    gc.freeze()  # Existing objects are frozen, so that each collection is fast.
    before = num_arrays()
    worker.open(slots.weights_on(), slots.REQUEST, suspends=False)
    num_leaves = len(jax.tree.leaves(slots.weights_on()))
    num_loaded = num_arrays()
    assert num_loaded == before + num_leaves + len(jax.tree.leaves(worker.engine.runner.cache))
    for version in range(3):
        worker.queue_weights(slots.weights_on(seed=version), policy_version=KEY + version)
    assert num_arrays() == num_loaded + num_leaves
    row = RolloutSequence(slots.PROMPTS[0], 0, 4, noise_step=KEY, name="row")
    worker.start_segment(RunSegment("fast-0", (), SegmentLimits(4)), deque([Admission(row, None)]))
    worker.finish_segment()
    assert row.segment_versions == [(KEY + 2, 4)]
    worker.close()
    assert num_arrays() == before
    gc.unfreeze()


def test_a_worker_error_is_raised_where_samples_are_collected() -> None:
    worker = RolloutWorker("fast-0", "fast", engine_on(0, True))
    generation = generation_of(scheduled([worker]))
    with dying(worker, lives=1, error=RuntimeError("the device is gone")):
        generation.submit(slots.PROMPTS[:HALF], noise_step=KEY)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is gone"):
                generation.collect_round()
    generation.close()
    assert not has_thread()


def test_a_sample_dropped_before_its_first_token_has_the_current_policy_version() -> None:
    row = RolloutSequence(
        slots.PROMPTS[0], 0, max_new_tokens=4, noise_step=57, finish_reason="dropped:non-finite logits"
    )
    row.segment_versions, row.segment_tokens = [(3, 0)], [np.zeros((3, 0), np.int32)]
    assert row.to_sample(0, slots.REQUEST, decode_text=str, stop_text=str).policy_version == 3


# Stopped at the end of a segment --------------------------------------------------------------------------------------


def after(num_looks: int) -> Callable[[], bool]:
    left = iter(range(num_looks))
    return lambda: next(left, None) is None


def test_a_requested_stop_ends_generation_and_frees_its_slots() -> None:
    made = slots.batching(engine_on(0, True))
    for looks in (0, 2):
        made.stop_requested = after(looks)
        with pytest.raises(StoppedError):
            made.generate(slots.weights_on(), slots.PROMPTS, slots.REQUEST)
        assert made.engine.runner.weights is None
    made.stop_requested = never_stop
    assert bits(made.generate(slots.weights_on(), slots.PROMPTS, slots.REQUEST)) == bits(expected())


def test_a_stopped_rollout_is_continued_with_only_the_missing_samples() -> None:
    made = scheduled(workers_on(2), in_turn=False)
    rows: list[RolloutSequence] = []
    made.on_sample_done = rows.append
    made.stop_requested = after(30)
    with pytest.raises(StoppedError):
        samples_of(made)
    assert all(worker.engine.runner.weights is None for worker in made.workers)
    assert not {"fast-0", "heavy-1"} & {thread.name for thread in threading.enumerate()}
    groups = {sample.uid: sample.group_id for sample in expected()}
    finished = {row.uid: made.to_sample(row, groups[row.uid], slots.REQUEST) for row in rows}
    assert 0 < len(finished) < len(slots.LENGTHS)
    made.stop_requested = never_stop
    drawn = made.stream(slots.weights_on(), slots.PROMPTS, slots.REQUEST, skipped_uids=finished)
    together = {sample.uid: sample for sample in (*finished.values(), *drawn)}
    assert len(together) == len(rows) == len(slots.LENGTHS)
    assert bits([together[sample.uid] for sample in expected()]) == bits(expected())


def test_collecting_a_round_of_a_stopped_rollout_raises_stopped_error() -> None:
    made = scheduled(workers_on(2), in_turn=True)
    stop_event = threading.Event()
    made.stop_requested = stop_event.is_set
    generation = generation_of(made)
    with closing(generation):
        generation.submit(slots.PROMPTS[:HALF], noise_step=KEY)
        generation.collect_round()
        stop_event.set()
        generation.submit(slots.PROMPTS[:HALF], noise_step=KEY)
        for _ in range(2):
            with pytest.raises(StoppedError):
                generation.collect_round()
    assert all(worker.engine.runner.weights is None for worker in made.workers)
