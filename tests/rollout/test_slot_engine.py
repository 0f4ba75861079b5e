"""Tests slots on devices: schedules do not change samples, programs are reused, and blocks are shared."""

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.mesh.placement import bytes_per_device
from app.mesh.program_cache import CompilationCounter
from app.rollout.engine.programs import copy_blocks
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.score.scorer import Scorer
from settings.errors import InputError
from tests.rollout.slots import (
    DEFINITION,
    FEW_PROGRAMS,
    FLOAT32,
    GROUP_SIZE,
    LENGTHS,
    LONGEST,
    PROMPTS,
    REQUEST,
    assert_same_samples,
    at_once,
    batching,
    bits_of,
    by_uid,
    few_blocks,
    few_codes,
    finish_rows,
    generate,
    new_slots,
    rows_of,
    run_at_random,
    run_segment,
    slots_of,
    weights_on,
)
from tests.tiny import ODD, make_mesh, packed_plan, random_params


@pytest.mark.parametrize("cache", ["large", "scarce", "int8"])
def test_exact_mode_is_bitwise_independent_of_schedule_and_block_count(cache: str) -> None:
    engine = {"large": slots_of, "scarce": few_blocks, "int8": few_codes}[cache](True)
    expected = bits_of(generate(engine if cache == "int8" else slots_of(True)))
    engine.counters.take()
    assert bits_of(generate(engine)) == expected
    counts = engine.counters.take()
    assert (counts.preempted_rows > 0) == (counts.recomputed_tokens > 0) == (cache != "large")
    assert counts.generated_tokens == sum(LENGTHS)
    assert counts.prompt_tokens == GROUP_SIZE * sum(len(prompt.token_ids) for prompt in PROMPTS)
    assert all(by_uid(run_at_random(engine, seed)) == expected for seed in range(2))


def test_new_weights_keep_generated_tokens_and_prefill_prompts_again() -> None:
    """In exact mode, the tokens of a row whose cache is lost are fed again unchanged."""
    engine, drawn, newer = slots_of(True), [], generate(slots_of(True), PROMPTS[:1], LONGEST)
    for first in (weights_on(), weights_on(seed=1)):
        row, beside, later = (RolloutSequence(PROMPTS[0], i, LONGEST, noise_step=3) for i in range(3))
        engine.open(first, REQUEST, suspends=True)
        engine.admit([row, beside])
        run_segment(engine, 7)
        known = by_uid([row])[row.uid]
        engine.suspend(row)
        engine.load_weights(weights_on(), policy_version=4)
        engine.admit([SuspendedSequence(row, None), later])
        assert row.num_tokens == 7 and by_uid([row])[row.uid] == known
        finish_rows(engine)
        engine.close()
        tokens, logprobs = by_uid([row])[row.uid]
        assert (tokens[:7], logprobs[: 4 * 7]) == known and len(tokens) == LONGEST
        assert row.segment_versions[0] == (3, 7) and {version for version, _ in row.segment_versions[1:]} == {4}
        assert by_uid([later])[later.uid] == bits_of(newer)[later.uid]
        drawn.append(tokens)
    assert drawn[0] == newer[0].completion_ids.tolist() != drawn[1]


@pytest.mark.parametrize("is_scarce", [False, True])
def test_logprobs_in_fast_mode_agree_with_the_scorer_under_any_schedule(is_scarce: bool) -> None:
    engine = few_blocks(False) if is_scarce else slots_of(False)
    engine.counters.take()
    rows = run_at_random(engine, 0)
    counts = engine.counters.take()
    assert (counts.preempted_rows > 0) == is_scarce and counts.recomputed_tokens > 0
    assert counts.generated_tokens == sum(LENGTHS) == sum(row.num_tokens for row in rows)
    samples = [
        replace(sample, completion_ids=row.token_ids, behavior_logprobs=row.logprobs)
        for sample, row in zip(at_once(), rows, strict=True)
    ]
    plan = packed_plan(samples, quota=64, row_length=32, share_prompts=True)
    scorer = Scorer(DEFINITION, make_mesh(), dtype=FLOAT32, logits_chunk=5)
    scored = scorer.per_token(random_params(DEFINITION), samples, plan, temperature=1.0)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=1e-4)


def test_many_slots_in_exact_mode_give_the_bits_of_fewer_slots() -> None:
    """The mesh's tp does not divide the key heads, so it splits the rows."""
    mesh_shape, sizes = (2, 1, 2), ((8, 12), (12, None))
    few, many = (
        new_slots(num_slots, exact=True, mesh_shape=mesh_shape, num_blocks=num_blocks, rows_together=4, **FEW_PROGRAMS)
        for num_slots, num_blocks in sizes
    )
    made = [batching(engine).generate(weights_on(mesh_shape), PROMPTS, REQUEST) for engine in (few, many)]
    assert bits_of(made[0]) == bits_of(made[1])
    assert few.counters.preempted_rows > 0 == many.counters.preempted_rows
    assert_same_samples(made[0], at_once())


def test_few_int8_blocks_on_several_devices_give_the_same_samples() -> None:
    few: Any = {"num_blocks": 12, "kv_cache": "int8", **FEW_PROGRAMS}
    engine = new_slots(4, exact=True, mesh_shape=(1, 1, 3), **few)
    samples = batching(engine).generate(weights_on((1, 1, 3)), PROMPTS, REQUEST)
    assert engine.counters.preempted_rows > 0
    # A value between two codes may be rounded to either.
    assert_same_samples(samples, generate(few_codes(True)), tolerance=2e-3)


# Programs --------------------------------------------------------------------------------------------------------


def test_refilled_slots_give_the_same_samples_without_compiling() -> None:
    queue, weights = batching(new_slots(8, exact=False, batch_buckets=(4, 8))), weights_on()
    queue.compile(SamplingRules(1.0, top_k=3))
    queue.engine.compile(SamplingRules(1.0), suspends=True)
    compilations = CompilationCounter()
    samples = queue.generate(weights, PROMPTS, REQUEST)
    for seed, rules in enumerate([SamplingRules(0.0), SamplingRules(0.3, 7, 0.7, 0.1)]):
        queue.generate(weights, PROMPTS, replace(REQUEST, rules=rules, seed=seed, policy_version=9))
        run_at_random(queue.engine, seed)
    assert compilations.take_count() == 0
    compilations.close()
    assert_same_samples(samples, at_once())
    for number, (sample, length) in enumerate(zip(samples, LENGTHS, strict=True)):
        group, index = divmod(number, GROUP_SIZE)
        assert (sample.prompt, sample.sample_index, sample.group_id) == (PROMPTS[group], index, group)
        assert len(sample.completion_ids) == len(sample.behavior_logprobs) == length
        assert sample.completion == " ".join(map(str, sample.completion_ids))
        assert (sample.finish_reason, sample.policy_version, sample.kept_mass_logs) == ("length", 3, None)
        assert sample.worker == "0" and sample.segments > 0 and sample.elapsed_s > 0


def test_each_distinct_prompt_is_prefilled_once_and_few_rows_use_the_small_program() -> None:
    engine = slots_of(False)
    engine.counters.take()
    twin = replace(PROMPTS[0], uid="twin")
    samples = generate(engine, [*PROMPTS, twin], 5)
    counts = engine.counters.take()
    distinct = sum(len(prompt.token_ids) for prompt in PROMPTS)
    assert counts.prefilled_tokens == distinct
    assert counts.prompt_tokens == GROUP_SIZE * (distinct + len(twin.token_ids))
    assert counts.generated_tokens == 5 * len(samples) <= counts.row_steps
    assert not {s.completion for s in samples if s.prompt is twin} & {s.completion for s in samples[:GROUP_SIZE]}
    generate(engine, PROMPTS[:1], 8)
    counts = engine.counters.take()
    assert engine.shapes.batch_buckets == (4, 8) and counts.segments == 1
    assert counts.row_steps == counts.generated_tokens == 4 * 8


def test_a_segment_ends_when_enough_rows_are_done_or_few_are_left() -> None:
    engine, rows = slots_of(True), rows_of([3, 7, 11, 14] * len(PROMPTS))[:4]
    engine.open(weights_on(), REQUEST)
    engine.admit(rows)
    limits: list[dict[str, int]] = [{"leave_when_finished": 1}, {"leave_when_active": 2}, {"length": 2}, {}]
    assert [run_segment(engine, **one) for one in limits] == [3, 4, 2, 5]
    assert [row.num_segments for row in rows] == [1, 2, 4, 4] and not engine.active_rows
    engine.close()


@pytest.mark.parametrize("slots", [slots_of, few_codes])
def test_a_row_with_non_finite_logits_ends_without_affecting_others(slots: Any) -> None:
    engine = slots(True)
    rows = rows_of([6] * len(LENGTHS))[:3]
    expected = {s.uid: s.completion_ids.tolist() for s in generate(engine, PROMPTS[:1], 6)}
    engine.open(weights_on(), REQUEST)
    engine.admit(rows)
    run_segment(engine, 4)
    whole, num_tokens = by_uid(rows), rows[1].num_tokens
    [second] = [slot.blocks[-1] for slot in engine.scheduler.slots if slot.row is rows[1]]
    # Codes are always finite, but their scales may not be.
    spoil = lambda x: x if x.dtype == jnp.int8 else x.at[second].set(np.nan)  # noqa: E731
    engine.runner.cache = jax.tree.map(spoil, engine.runner.cache)
    finish_rows(engine)
    caches = [np.asarray(layer) for layer in jax.tree.leaves(engine.runner.cache)]
    engine.close()
    assert [row.finish_reason for row in rows] == ["length", "dropped:non-finite logits", "length"]
    assert by_uid(rows)[rows[1].uid] == whole[rows[1].uid] and rows[1].num_tokens == num_tokens > 0
    for row in (rows[0], rows[2]):
        assert row.token_ids.tolist() == expected[row.uid] and np.isfinite(row.logprobs).all()
    # No NaN is left in the blocks for later rows.
    assert all(np.isfinite(layer).all() for layer in caches)


def test_samples_that_do_not_fit_the_slots_are_refused_before_anything_runs() -> None:
    long = replace(PROMPTS[0], token_ids=np.zeros(9, np.int32))
    with pytest.raises(InputError, match=r"data\.max_prompt_length: a prompt has 9 tokens.* at most 8"):
        generate(slots_of(True), [long], 5)
    with pytest.raises(InputError, match=r"rollout\.max_new_tokens: .* exceed the 32 tokens of a slot"):
        generate(slots_of(True), max_new_tokens=40)
    with pytest.raises(InputError, match=r"rollout\.kv_blocks: 9 blocks of 4 tokens .* 32 tokens; .* at least 10"):
        new_slots(4, exact=True, num_blocks=9)
    sizes: Any = {"max_prompt_length": 8, "max_new_tokens": 8, "prefill_length_min": 4, "segment_max": 8}
    with pytest.raises(InputError, match=r"rollout\.slots: 6 .* 4 devices"):
        make_slot_shapes(6, **sizes, exact=False, row_shards=4)


# Blocks ----------------------------------------------------------------------------------------------------------


def test_samples_share_the_blocks_of_their_prompt() -> None:
    engine = few_blocks(True)
    engine.counters.take()
    generate(engine, [replace(PROMPTS[0], token_ids=np.arange(1, 9, dtype=np.int32))], 4)
    # Four rows of three blocks, of which they share the first, run at once in ten blocks.
    assert engine.counters.take().segments == 1


def test_an_int8_cache_rounds_little_and_takes_one_byte_per_number() -> None:
    rounded, exact = generate(few_codes(True)), generate(slots_of(True))
    for ours, theirs in zip(rounded, exact, strict=True):
        # After the first different token, the samples are unrelated.
        same = ours.completion_ids == theirs.completion_ids
        together = len(same) if same.all() else int(same.argmin())
        assert np.abs(ours.behavior_logprobs - theirs.behavior_logprobs)[:together].max(initial=0) < 0.2
    assert bits_of(rounded) != bits_of(exact)
    of_token = lambda engine: bytes_per_device(engine.programs.abstract_pool) / engine.programs.num_blocks / 4  # noqa: E731
    numbers = 2 * ODD.num_layers * ODD.num_kv_heads
    assert of_token(few_codes(True)) == numbers * (ODD.head_dim + 4), "and a scale for each head"
    assert of_token(few_blocks(True)) == numbers * ODD.head_dim * 4


def test_copying_kv_blocks_at_once_equals_copying_them_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = jax.tree.map(
        lambda x: np.arange(math.prod(x.shape)).reshape(x.shape).astype(x.dtype), few_codes(True).programs.abstract_pool
    )
    arguments = np.array([3, -1, 5, 7]), np.array([1, 2, 8, 9]), np.array([3])
    one_by_one = jax.jit(copy_blocks)(pool, *arguments)
    monkeypatch.setattr("app.rollout.engine.programs.current_device", lambda: ("gpu", ""))
    at_once = jax.jit(functools.partial(copy_blocks))(pool, *arguments)
    for together, other, old in zip(*map(jax.tree.leaves, (at_once, one_by_one, pool)), strict=True):
        np.testing.assert_array_equal(together, other)
        np.testing.assert_array_equal(together[8], old[5])
        assert not together[2].any()
        np.testing.assert_array_equal(together[9], old[9])
