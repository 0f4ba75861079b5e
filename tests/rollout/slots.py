"""Makes slots of a tiny model, and generates samples in them."""

import functools
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from app.model.architecture import Architecture
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt, Sample
from app.rollout.engine.continuous_batching import ContinuousBatchGenerator
from app.rollout.engine.engine import SlotEngine
from app.rollout.engine.shapes import make_slot_shapes
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from settings.schema.rollout import KVCacheType, SegmentSettings
from tests.tiny import ODD, TinyEngine, make_mesh, random_params, random_prompts, spell

FLOAT32 = np.dtype("float32")
DEFINITION = DecoderDefinition.create(ODD)
PROMPTS = random_prompts(5, vocab_size=ODD.vocab_size, longest=8)
GROUP_SIZE = 4
LENGTHS = [1, *np.random.default_rng(3).integers(1, 25, len(PROMPTS) * GROUP_SIZE - 1).tolist()]
"""Lengths of completions, which the tests force."""
LONGEST = 24
FEW_PROGRAMS: Any = {"prompt_buckets": (8,), "prefill_rows": (1,), "recompute_buckets": (32,)}
"""Settings with a single program for all lengths."""
REQUEST = GenerationRequest(
    group_size=GROUP_SIZE, max_new_tokens=LENGTHS, rules=SamplingRules(1.0), seed=0, policy_version=3
)


@functools.cache
def weights_on(
    shape: tuple[int, int, int] = (1, 1, 1), architecture: Architecture = ODD, seed: int = 0
) -> DecodeWeights:
    definition = DecoderDefinition.create(architecture)
    return TinyEngine(definition, make_mesh(shape)).to_decode_weights(random_params(definition, seed))


def new_slots(
    num_slots: int,
    *,
    exact: bool,
    mesh_shape: tuple[int, int, int] = (1, 1, 1),
    definition: DecoderDefinition = DEFINITION,
    num_blocks: int | None = None,
    **changes: Any,
) -> SlotEngine:
    shapes = make_slot_shapes(
        num_slots,
        max_prompt_length=8,
        max_new_tokens=LONGEST,
        prefill_length_min=4,
        segment_max=16,
        exact=exact,
        num_blocks=num_blocks,
    )._replace(block_size=4, **changes)
    return SlotEngine(definition, make_mesh(mesh_shape), shapes, eos_ids=(), dtype=FLOAT32, exact=exact)


@functools.cache
def slots_of(exact: bool) -> SlotEngine:
    """Returns slots with enough blocks, in fast mode with a second program for half their number."""
    return new_slots(4, exact=True) if exact else new_slots(8, exact=False, batch_buckets=(4, 8))


@functools.cache
def few_blocks(exact: bool, kv_cache: KVCacheType | None = None) -> SlotEngine:
    """Returns four slots with blocks for one of the longest samples, or a few shorter ones."""
    return new_slots(4, exact=exact, num_blocks=12, kv_cache=kv_cache, **FEW_PROGRAMS)


few_codes = functools.partial(few_blocks, kv_cache="int8")


def batching(engine: SlotEngine, **rule: object) -> ContinuousBatchGenerator:
    settings = SegmentSettings.model_validate({"min": 1, **rule})
    return ContinuousBatchGenerator(engine, decode_text=spell, stop_text=spell, segment_rule=settings)


def generate(
    engine: SlotEngine, prompts: Sequence[Prompt] = PROMPTS, max_new_tokens: int | Sequence[int] = LENGTHS
) -> list[Sample]:
    return batching(engine).generate(weights_on(), prompts, replace(REQUEST, max_new_tokens=max_new_tokens))


@functools.cache
def at_once() -> list[Sample]:
    """Returns the samples, generated with one slot for each."""
    return TinyEngine(DEFINITION).generate(weights_on(), PROMPTS, REQUEST)


def by_uid(rows: Sequence[RolloutSequence]) -> dict[str, tuple[list[int], bytes]]:
    """Returns tokens, and logprobs bit for bit, by uid."""
    return {row.uid: (row.token_ids.tolist(), row.logprobs.tobytes()) for row in rows}


def bits_of(samples: Sequence[Sample]) -> dict[str, tuple[list[int], bytes]]:
    return {one.uid: (one.completion_ids.tolist(), one.behavior_logprobs.tobytes()) for one in samples}


def assert_same_samples(ours: Sequence[Sample], expected: Sequence[Sample], *, tolerance: float = 1e-5) -> None:
    for sample, other in zip(ours, expected, strict=True):
        assert sample.uid == other.uid
        np.testing.assert_array_equal(sample.completion_ids, other.completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, other.behavior_logprobs, atol=tolerance)


def rows_of(lengths: Sequence[int] = LENGTHS) -> list[RolloutSequence]:
    places = (divmod(i, GROUP_SIZE) for i in range(len(LENGTHS)))
    return [RolloutSequence(PROMPTS[p], i, lengths[GROUP_SIZE * p + i], noise_step=3) for p, i in places]


def run_segment(engine: SlotEngine, length: int = 16, **limits: int) -> int:
    engine.start_segment(SegmentLimits(length, **limits))
    segment = engine.finish_segment()
    segment.collect()
    return segment.steps


def finish_rows(engine: SlotEngine) -> None:
    while engine.active_rows:
        run_segment(engine)


def run_at_random(engine: SlotEngine, seed: int) -> list[RolloutSequence]:
    """Generates with random orders, lengths, suspensions and lost caches."""
    rng = np.random.default_rng(seed)
    rows = rows_of()
    waiting: deque[RolloutSequence | SuspendedSequence] = deque(rows[i] for i in rng.permutation(len(rows)))
    engine.open(weights_on(), REQUEST, suspends=True)
    while waiting or engine.active_rows:
        num_admitted = int(rng.integers(0 if engine.active_rows else 1, engine.num_free_slots + 1))
        engine.admit([waiting.popleft() for _ in range(min(num_admitted, len(waiting)))])
        limits = rng.integers(1, 9), rng.integers(1, 4), rng.integers(0, len(engine.active_rows))
        engine.start_segment(SegmentLimits(*map(int, limits)))
        engine.finish_segment().collect()
        if engine.active_rows and rng.random() < 0.5:
            chosen = rng.permutation(len(engine.active_rows))[: int(rng.integers(1, 3))]
            for suspended in map(engine.suspend, [engine.active_rows[i] for i in chosen]):
                waiting.append(suspended if rng.random() < 0.6 else suspended._replace(cache=None))
    engine.close()
    return rows
