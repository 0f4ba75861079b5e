from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.mesh.placement import bytes_per_device, num_row_shards
from app.mesh.program_cache import CompilationCounter
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt, Sample
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.programs import SlotPrograms, copy_blocks
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import DecodeText, RolloutSequence, SuspendedSequence
from app.score.scorer import Scorer
from settings.errors import InputError
from settings.schema.rollout import KVCacheType, SegmentSettings
from tests.tiny import ODD, TinyEngine, make_engine, make_mesh, packed_plan, random_params, random_prompts, spell

FLOAT32 = np.dtype("float32")
DEFINITION = DecoderDefinition.create(ODD)
PROMPTS = random_prompts(5, vocab_size=ODD.vocab_size, longest=8)
GROUP_SIZE = 4
LENGTHS = [int(n) for n in np.random.default_rng(3).integers(1, 25, len(PROMPTS) * GROUP_SIZE)]
"""Lengths of completions, which the tests force."""
LONGEST = 24
REQUEST = GenerationRequest(
    group_size=GROUP_SIZE, max_new_tokens=LENGTHS, rules=SamplingRules(1.0), seed=0, policy_version=3
)


@functools.cache
def weights_on(shape: tuple[int, int, int] = (1, 1, 1)) -> DecodeWeights:
    return make_engine(DEFINITION, make_mesh(shape)).to_decode_weights(random_params(DEFINITION))


def new_slots(
    num_slots: int,
    *,
    exact: bool,
    mesh_shape: tuple[int, int, int] = (1, 1, 1),
    eos_ids: Sequence[int] = (),
    decode_text: DecodeText | None = None,
    block_size: int | None = None,
    num_blocks: int | None = None,
    kv_cache: KVCacheType | None = None,
    row_limit: int | None = None,
    rows_together: int | None = None,
) -> SlotEngine:
    """Returns slots with a second program for half their number, in fast mode."""
    shapes = make_slot_shapes(
        num_slots,
        max_prompt_length=8,
        max_new_tokens=LONGEST,
        prefill_length_min=4,
        segment_max=16,
        exact=exact,
        num_blocks=num_blocks,
    )._replace(block_size=block_size, kv_cache=kv_cache, row_limit=row_limit, rows_together=rows_together)
    if not exact:
        shapes = shapes._replace(batch_buckets=(num_slots // 2, num_slots))
    made = {"eos_ids": eos_ids, "dtype": FLOAT32, "exact": exact, "decode_text": decode_text}
    return SlotEngine(DEFINITION, make_mesh(mesh_shape), shapes, **made)


@functools.cache
def slots_of(exact: bool) -> SlotEngine:
    return new_slots(4 if exact else 8, exact=exact)


def batching(engine: SlotEngine, **rule: object) -> ContinuousBatchGenerator:
    return ContinuousBatchGenerator(
        engine, decode_text=spell, segment_rule=SegmentSettings.model_validate({"min": 1, **rule})
    )


def generate(
    engine: SlotEngine,
    prompts: Sequence[Prompt] = PROMPTS,
    max_new_tokens: int | Sequence[int] = LENGTHS,
    **rule: object,
) -> list[Sample]:
    request = replace(REQUEST, max_new_tokens=max_new_tokens)
    return batching(engine, **rule).generate(weights_on(), prompts, request)


@functools.cache
def unlimited_slots() -> TinyEngine:
    return make_engine(DEFINITION)


@functools.cache
def at_once() -> list[Sample]:
    """Returns the samples of a slot for each of them."""
    return unlimited_slots().generate(weights_on(), PROMPTS, REQUEST)


def by_uid(rows: Sequence[RolloutSequence]) -> dict[str, tuple[list[int], bytes]]:
    """Returns tokens, and logprobs bit for bit, by uid."""
    return {row.uid: (row.token_ids.tolist(), row.logprobs.tobytes()) for row in rows}


def bits_of(samples: Sequence[Sample]) -> dict[str, tuple[list[int], bytes]]:
    """Returns what `by_uid` does."""
    return {one.uid: (one.completion_ids.tolist(), one.behavior_logprobs.tobytes()) for one in samples}


def rows_of(prompts: Sequence[Prompt] = PROMPTS, lengths: Sequence[int] = LENGTHS) -> list[RolloutSequence]:
    numbers = range(len(prompts) * GROUP_SIZE)
    return [RolloutSequence(prompts[i // GROUP_SIZE], i % GROUP_SIZE, lengths[i], noise_step=3) for i in numbers]


def run_at_random(engine: SlotEngine, seed: int, *, suspends: bool = True) -> list[RolloutSequence]:
    """Generates with random orders, lengths, suspensions and lost caches."""
    rng = np.random.default_rng(seed)
    rows = rows_of()
    waiting: deque[RolloutSequence | SuspendedSequence] = deque(rows[i] for i in rng.permutation(len(rows)))
    engine.open(weights_on(), REQUEST, suspends=suspends)
    while waiting or engine.active_rows:
        num_admitted = int(rng.integers(0 if engine.active_rows else 1, engine.num_free_slots + 1))
        engine.admit([waiting.popleft() for _ in range(min(num_admitted, len(waiting)))])
        limits = rng.integers(1, 9), rng.integers(1, 4), rng.integers(0, len(engine.active_rows))
        engine.start_segment(SegmentLimits(*map(int, limits)))
        engine.finish_segment().collect()
        if suspends and engine.active_rows and rng.random() < 0.5:
            chosen = rng.permutation(len(engine.active_rows))[: int(rng.integers(1, 3))]
            for suspended in map(engine.suspend, [engine.active_rows[i] for i in chosen]):
                waiting.append(suspended if rng.random() < 0.6 else suspended._replace(cache=None))
    engine.close()
    return rows


def test_refilled_slots_make_the_samples_of_a_slot_for_each():
    samples = generate(slots_of(False))
    for ours, theirs, length in zip(samples, at_once(), LENGTHS, strict=True):
        assert (ours.uid, ours.group_id, ours.finish_reason) == (theirs.uid, theirs.group_id, "length")
        assert len(ours.completion_ids) == length and ours.kept_mass_logs is None
        assert ours.worker == theirs.worker == "0" and ours.elapsed_s > 0
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_in_exact_mode_no_schedule_changes_a_bit_of_any_sample(seed):
    expected = bits_of(generate(slots_of(True)))
    assert by_uid(run_at_random(slots_of(True), seed)) == expected


def test_in_exact_mode_tokens_stay_what_they_are_when_the_weights_have_changed():
    engine = slots_of(True)
    drawn = []
    for first in (weights_on(), jax.tree.map(lambda x: 1.5 * x, weights_on())):
        row, beside = (RolloutSequence(PROMPTS[0], i, LONGEST, noise_step=3) for i in range(2))
        engine.open(first, REQUEST, suspends=True)
        engine.admit([row, beside])
        engine.start_segment(SegmentLimits(7))
        engine.finish_segment().collect()
        known = by_uid([row])[row.uid]
        engine.suspend(row)
        engine.load_weights(weights_on(), policy_version=4)
        engine.admit([SuspendedSequence(row, None)])
        assert row.num_tokens == 7 and by_uid([row])[row.uid] == known
        while engine.active_rows:
            engine.start_segment(SegmentLimits(16))
            engine.finish_segment().collect()
        engine.close()
        tokens, logprobs = by_uid([row])[row.uid]
        assert (tokens[:7], logprobs[: 4 * 7]) == known and len(tokens) == LONGEST
        assert row.segment_versions[0] == (3, 7) and {version for version, _ in row.segment_versions[1:]} == {4}
        drawn.append(tokens)
    assert drawn[0] != drawn[1]
    assert drawn[0] == generate(engine, PROMPTS[:1], LONGEST)[0].completion_ids.tolist()


@pytest.mark.parametrize("seed", range(2))
def test_in_fast_mode_any_schedule_agrees_with_the_scorer(seed):
    rows = run_at_random(slots_of(False), seed)
    groups = {prompt.uid: i for i, prompt in enumerate(PROMPTS)}
    samples = [
        replace(
            at_once()[i],
            completion_ids=row.token_ids,
            behavior_logprobs=row.logprobs,
            group_id=groups[row.prompt.uid],
        )
        for i, row in enumerate(rows)
    ]
    assert [len(s.completion_ids) for s in samples] == LENGTHS
    plan = packed_plan(samples, quota=64, row_length=32, share_prompts=True)
    scorer = Scorer(DEFINITION, make_mesh(), dtype=FLOAT32, logits_chunk=5)
    scored = scorer.per_token(random_params(DEFINITION), samples, plan, temperature=1.0)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=1e-4)


def test_nothing_is_compiled_once_the_slots_are_open():
    engine = slots_of(False)
    run_at_random(engine, 0)
    compilations = CompilationCounter()
    for seed in range(2, 6):
        run_at_random(engine, seed)
    generate(engine, PROMPTS[::-1], LENGTHS[::-1])
    assert compilations.take_count() == 0
    compilations.close()


def test_programs_compiled_ahead_serve_the_first_rollout_even_under_rules_that_exclude_no_token():
    queue = batching(new_slots(4, exact=True))
    queue.compile(SamplingRules(1.0, top_k=3))
    weights, compilations = weights_on(), CompilationCounter()
    queue.compile(SamplingRules(0.0))
    samples = queue.generate(weights, PROMPTS[:2], replace(REQUEST, max_new_tokens=5))
    assert compilations.take_count() == 0
    compilations.close()
    for ours, whole in zip(samples, generate(slots_of(True), PROMPTS[:2], 5), strict=True):
        assert ours.completion_ids.tolist() == whole.completion_ids.tolist() and ours.kept_mass_logs is None
        np.testing.assert_allclose(ours.behavior_logprobs, whole.behavior_logprobs, atol=1e-6)


@pytest.mark.parametrize(("num_slots", "max_prompt_length", "max_new_tokens"), [(32, 128, 1024), (256, 512, 8192)])
def test_there_are_few_programs_however_long_the_samples(num_slots, max_prompt_length, max_new_tokens):
    shapes = make_slot_shapes(
        num_slots,
        max_prompt_length=max_prompt_length,
        max_new_tokens=max_new_tokens,
        prefill_length_min=16,
        segment_max=4096,
        exact=False,
    )
    programs = SlotPrograms(DEFINITION, make_mesh(), shapes, dtype=FLOAT32, num_eos=1)
    specs = programs.program_specs(suspends=True, recomputes=True, truncates=False)
    assert len(specs) == len(programs.program_specs(suspends=True, recomputes=True, truncates=True)) <= 16
    assert sum(name[0] == "decode" for name in specs) == 3


def test_each_distinct_prompt_is_read_once():
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


def test_after_new_weights_prompts_are_read_anew():
    engine = slots_of(True)
    other = jax.tree.map(lambda x: 1.5 * x, weights_on())
    prompt = PROMPTS[0]

    def first_logprob(*loads: DecodeWeights) -> float:
        engine.open(loads[0], REQUEST)
        engine.prefill([prompt])
        for weights in loads[1:]:
            engine.load_weights(weights, policy_version=4)
        row = RolloutSequence(prompt, 0, 1, noise_step=3)
        engine.admit([row])
        engine.start_segment(SegmentLimits(1))
        engine.finish_segment().collect()
        engine.close()
        return row.logprobs[0]

    assert first_logprob(weights_on(), other) == first_logprob(other) != first_logprob(weights_on())


def test_few_samples_in_many_slots_decode_in_the_small_program_at_once():
    engine = slots_of(False)
    engine.counters.take()
    samples = generate(engine, PROMPTS[:1], 8)
    counts = engine.counters.take()
    assert len(samples) == engine.shapes.batch_buckets[0] == 4
    assert counts.segments == 1
    assert counts.row_steps == counts.generated_tokens == 4 * 8


def test_a_segment_leaves_when_enough_rows_are_done_or_few_are_left():
    engine, rows = slots_of(True), rows_of(lengths=[3, 7, 11, 14] * len(PROMPTS))[:4]
    engine.open(weights_on(), REQUEST)
    engine.admit(rows)
    steps = []
    for limits in ({"leave_when_finished": 1}, {"leave_when_active": 2}, {"length": 2}, {}):
        engine.start_segment(SegmentLimits(**({"length": 16} | limits)))
        steps.append(engine.finish_segment().steps)
    assert steps == [3, 4, 2, 5]
    assert [row.num_segments for row in rows] == [1, 2, 4, 4] and not engine.active_rows
    engine.close()


def test_a_row_is_done_at_its_first_token_where_that_ends_it_or_no_more_are_allowed():
    samples = generate(slots_of(True), max_new_tokens=1)
    assert [len(s.completion_ids) for s in samples] == [1] * len(samples)
    eos_ids = tuple({int(s.completion_ids[0]) for s in samples[:6]})
    ended = generate(new_slots(4, exact=True, eos_ids=eos_ids), max_new_tokens=3)
    assert [s.finish_reason for s in ended[:6]] == ["stop"] * 6
    assert [s.completion_ids.tolist() for s in ended[:6]] == [s.completion_ids.tolist() for s in samples[:6]]
    assert any(s.finish_reason == "length" and len(s.completion_ids) == 3 for s in ended)


@pytest.mark.parametrize(("exact", "kv_cache"), [(True, None), (False, None), (True, "int8")])
def test_a_row_whose_logits_are_not_finite_ends_before_them_and_no_neighbour_changes(exact, kv_cache):
    engine = new_slots(4, exact=True, kv_cache=kv_cache) if kv_cache else slots_of(exact)
    rows = rows_of(lengths=[9] * len(LENGTHS))[:3]
    expected = {s.uid: s.completion_ids.tolist() for s in generate(engine, PROMPTS[:1], 9)}
    engine.open(weights_on(), REQUEST)
    engine.admit(rows)
    engine.start_segment(SegmentLimits(4))
    engine.finish_segment().collect()
    whole, num_tokens = by_uid(rows), rows[1].num_tokens
    [second] = [slot.blocks[0] for slot in engine.scheduler.slots if slot.row is rows[1]]
    # Codes are finite, their scales may not be.
    spoil = lambda x: x if x.dtype == jnp.int8 else x.at[second].set(np.nan)  # noqa: E731
    engine.runner.cache = jax.tree.map(spoil, engine.runner.cache)
    while engine.active_rows:
        engine.start_segment(SegmentLimits(16))
        engine.finish_segment().collect()
    caches = [np.asarray(layer) for layer in jax.tree.leaves(engine.runner.cache)]
    engine.close()
    assert [row.finish_reason for row in rows] == ["length", "dropped:non-finite logits", "length"]
    assert by_uid(rows)[rows[1].uid] == whole[rows[1].uid] and rows[1].num_tokens == num_tokens > 0
    for row in (rows[0], rows[2]):
        assert row.token_ids.tolist() == expected[row.uid] and np.isfinite(row.logprobs).all()
    # Nothing is left in the blocks for whoever comes next.
    assert all(np.isfinite(layer).all() for layer in caches)


def test_a_prompt_beyond_the_slots_is_refused_before_anything_runs():
    long = replace(PROMPTS[0], token_ids=np.zeros(9, np.int32))
    with pytest.raises(InputError, match=r"data\.max_prompt_length: a prompt has 9 tokens.* at most 8"):
        generate(slots_of(True), [long], 5)
    with pytest.raises(InputError, match=r"rollout\.max_new_tokens: .* more than the 32"):
        generate(slots_of(True), max_new_tokens=40)


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (2, 1, 1)])
def test_in_exact_mode_rows_in_groups_round_as_fewer_slots_do(mesh_shape: tuple[int, int, int]) -> None:
    few, many = (new_slots(n, exact=True, mesh_shape=mesh_shape, rows_together=4) for n in (4, 12))
    made = [batching(engine).generate(weights_on(mesh_shape), PROMPTS, REQUEST) for engine in (few, many)]
    assert bits_of(made[0]) == bits_of(made[1])


def test_no_slot_is_kept_empty_for_tokens_that_its_row_will_have_elsewhere() -> None:
    engine = new_slots(8, exact=True, block_size=4, row_limit=16)
    rows = rows_of(lengths=[LONGEST] * len(LENGTHS))[:8]
    engine.open(weights_on(), REQUEST, suspends=True)
    for _ in range(2):
        engine.admit([*rows])
        assert len(engine.scheduler.slots) == 8 and not engine.scheduler.queued
        longest = max(len(row.prompt.token_ids) + row.num_tokens for row in rows)
        engine.start_segment(SegmentLimits(16 - longest))
        engine.finish_segment().collect()
        for row in rows:
            engine.suspend(row)
        rows = rows_of(lengths=[LONGEST] * len(LENGTHS))[8:16]
    engine.close()


def test_slots_that_devices_cannot_share_are_refused():
    sizes: Any = {"max_prompt_length": 8, "max_new_tokens": 8, "prefill_length_min": 4}
    sizes |= {"segment_max": 8}
    with pytest.raises(InputError, match=r"rollout\.slots: 6 .* 4 devices"):
        make_slot_shapes(6, **sizes, exact=False, row_shards=4)


# Blocks ----------------------------------------------------------------------------------------------------------


@functools.cache
def few_blocks(exact: bool) -> SlotEngine:
    """Returns four slots with blocks for one of the longest samples, or a few shorter ones."""
    return new_slots(4, exact=exact, block_size=4, num_blocks=12)


def num_free(engine: SlotEngine) -> list[int]:
    return [device.pool.num_available() for device in engine.scheduler.devices]


@pytest.mark.parametrize("seed", range(2))
def test_where_blocks_run_out_rows_give_theirs_up_and_no_bit_of_a_sample_changes(seed: int) -> None:
    engine = few_blocks(True)
    engine.counters.take()
    expected = bits_of(generate(engine))
    counts = engine.counters.take()
    assert counts.preempted_rows > 0 and counts.recomputed_tokens > 0
    assert counts.generated_tokens == sum(LENGTHS)
    assert counts.prompt_tokens == GROUP_SIZE * sum(len(prompt.token_ids) for prompt in PROMPTS)
    assert by_uid(run_at_random(engine, seed)) == expected
    for sample in at_once():
        assert expected[sample.uid][0] == sample.completion_ids.tolist()


def test_in_fast_mode_rows_that_gave_their_blocks_up_are_computed_again() -> None:
    engine = few_blocks(False)
    engine.counters.take()
    samples = generate(engine)
    counts = engine.counters.take()
    assert counts.preempted_rows > 0 and counts.recomputed_tokens > 0
    assert counts.generated_tokens == sum(LENGTHS)
    for ours, theirs in zip(samples, at_once(), strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-5)


def test_blocks_follow_tokens_samples_share_those_of_their_prompt_and_all_come_back() -> None:
    engine = new_slots(4, exact=True, block_size=4)
    assert engine.programs.num_blocks == 4 * 8 + 2
    prompt = replace(PROMPTS[0], token_ids=np.arange(1, 8, dtype=np.int32))
    rows = [RolloutSequence(prompt, i, max_new_tokens=LONGEST, noise_step=3) for i in range(4)]
    engine.open(weights_on(), REQUEST)
    before = num_free(engine)
    engine.admit(rows)
    # Tokens 0 to 3 are shared, and each sample has its own block of the next three; so has the prompt.
    assert [len(slot.blocks) for slot in engine.scheduler.slots] == [2] * 4
    assert (
        len({slot.blocks[0] for slot in engine.scheduler.slots}) == 1
        and len({slot.blocks[1] for slot in engine.scheduler.slots}) == 4
    )
    # The prompt's own last block is given up where others need it.
    assert before[0] - num_free(engine)[0] == 1 + 4
    engine.start_segment(SegmentLimits(4))
    assert [len(slot.blocks) for slot in engine.scheduler.slots] == [3] * 4
    engine.finish_segment().collect()
    while engine.active_rows:
        engine.start_segment(SegmentLimits(16))
        engine.finish_segment().collect()
    assert num_free(engine) == before
    engine.close()


def of_8_bits(mesh_shape: tuple[int, int, int] = (1, 1, 1)) -> SlotEngine:
    """Returns slots whose cache is codes, with few blocks on each device."""
    num_slots = 4 * num_row_shards(make_mesh(mesh_shape))
    return new_slots(num_slots, exact=True, mesh_shape=mesh_shape, block_size=4, num_blocks=12, kv_cache="int8")


@functools.cache
def samples_of_8_bits() -> list[Sample]:
    engine = new_slots(4, exact=True, block_size=4, kv_cache="int8")
    samples = generate(engine)
    assert engine.counters.take().preempted_rows == 0
    return samples


def test_a_cache_of_8_bits_rounds_a_little() -> None:
    exact = generate(slots_of(True))
    for ours, theirs in zip(samples_of_8_bits(), exact, strict=True):
        # Behind the first token that differs, they have nothing in common.
        same = ours.completion_ids == theirs.completion_ids
        together = len(same) if same.all() else int(same.argmin())
        assert np.abs(ours.behavior_logprobs - theirs.behavior_logprobs)[:together].max(initial=0) < 0.2
    assert bits_of(samples_of_8_bits()) != bits_of(exact)


@pytest.mark.parametrize("seed", range(2))
def test_a_cache_of_8_bits_is_moved_suspended_and_made_again_bit_for_bit(seed: int) -> None:
    engine = of_8_bits()
    rows = run_at_random(engine, seed)
    assert engine.counters.take().preempted_rows > 0
    assert by_uid(rows) == bits_of(samples_of_8_bits())


@pytest.mark.parametrize("mesh_shape", [(1, 1, 3), (2, 1, 2)], ids=str)
def test_a_cache_of_8_bits_on_several_devices_is_the_same(mesh_shape: tuple[int, int, int]) -> None:
    """Key heads are split over tp (3), or, where it does not divide them (2), rows are."""
    samples = batching(of_8_bits(mesh_shape)).generate(weights_on(mesh_shape), PROMPTS, REQUEST)
    for ours, theirs in zip(samples, samples_of_8_bits(), strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
        # A number that lies between two codes may get either.
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=2e-3)


def test_a_cache_of_8_bits_takes_a_byte_for_each_number_and_four_for_each_head() -> None:
    of_token = lambda engine: bytes_per_device(engine.programs.abstract_pool) / engine.programs.num_blocks / 4  # noqa: E731
    numbers = 2 * DEFINITION.architecture.num_layers * DEFINITION.architecture.num_kv_heads
    assert of_token(of_8_bits()) == numbers * (DEFINITION.architecture.head_dim + 4)
    assert of_token(few_blocks(True)) == numbers * DEFINITION.architecture.head_dim * 4


@pytest.mark.parametrize("kv_cache", [None, "int8"])
def test_blocks_are_copied_alike_at_once_and_one_after_another(
    kv_cache: KVCacheType | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = jax.tree.map(
        lambda x: jnp.arange(math.prod(x.shape)).reshape(x.shape).astype(x.dtype),
        new_slots(4, exact=True, block_size=4, num_blocks=12, kv_cache=kv_cache).programs.abstract_pool,
    )
    arguments = jnp.array([3, -1, 5, 7]), jnp.array([1, 2, 8, 9]), jnp.array([3])
    one_by_one = copy_blocks(pool, *arguments)
    monkeypatch.setattr("app.rollout.engine.programs.current_device", lambda: ("gpu", ""))
    for together, other, old in zip(
        *map(jax.tree.leaves, (copy_blocks(pool, *arguments), one_by_one, pool)), strict=True
    ):
        np.testing.assert_array_equal(together, other)
        np.testing.assert_array_equal(together[8], old[5])
        assert not together[2].any()
        np.testing.assert_array_equal(together[9], old[9])


def test_blocks_that_do_not_hold_one_sample_are_refused() -> None:
    with pytest.raises(InputError, match=r"rollout\.kv_blocks: 9 blocks of 4 tokens .* 32 tokens; .* at least 10"):
        new_slots(4, exact=True, block_size=4, num_blocks=9)


def test_blocks_on_several_devices_make_the_same_samples() -> None:
    engine = new_slots(8, exact=True, mesh_shape=(2, 1, 2), block_size=4, num_blocks=12)
    engine.counters.take()
    request = replace(REQUEST, max_new_tokens=LONGEST)
    samples = batching(engine).generate(weights_on((2, 1, 2)), PROMPTS[:3], request)
    assert engine.counters.take().preempted_rows > 0
    for ours, theirs in zip(samples, unlimited_slots().generate(weights_on(), PROMPTS[:3], request), strict=True):
        np.testing.assert_array_equal(ours.completion_ids, theirs.completion_ids)
        np.testing.assert_allclose(ours.behavior_logprobs, theirs.behavior_logprobs, atol=1e-5)
