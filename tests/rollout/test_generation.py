from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.mesh.program_cache import CompilationCounter
from app.model.architecture import Architecture
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition, Params
from app.model.segment_layout import single_segment_layout
from app.records.sample import Prompt, Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.score.scorer import Scorer
from tests.tiny import BIASED, ODD, TinyEngine, make_engine, make_mesh, packed_plan, random_params, random_prompts

PROMPTS = random_prompts(3, vocab_size=ODD.vocab_size)
FLOAT32 = jnp.dtype("float32")
REQUEST = GenerationRequest(group_size=4, max_new_tokens=6, rules=SamplingRules(1.0), seed=0, policy_version=3)


@functools.cache
def definition_of(architecture: Architecture) -> DecoderDefinition:
    return DecoderDefinition.create(architecture)


@functools.cache
def params_of(architecture: Architecture) -> Params:
    return random_params(definition_of(architecture))


@functools.cache
def engine_of(architecture: Architecture, eos_ids: tuple[int, ...] = ()) -> tuple[TinyEngine, DecodeWeights]:
    engine = make_engine(definition_of(architecture), eos_ids=eos_ids)
    return engine, engine.to_decode_weights(params_of(architecture))


@functools.cache
def scorer_of(architecture: Architecture) -> Scorer:
    return Scorer(definition_of(architecture), make_mesh(), dtype=FLOAT32, logits_chunk=5)


def generate(
    prompts: Sequence[Prompt] = PROMPTS,
    *,
    architecture: Architecture = ODD,
    eos_ids: tuple[int, ...] = (),
    **changes,
) -> list[Sample]:
    engine, weights = engine_of(architecture, eos_ids)
    return engine.generate(weights, prompts, replace(REQUEST, **changes))


def texts(samples: Sequence[Sample]) -> dict[str, str]:
    return {s.uid: s.completion for s in samples}


def assert_same(ours: Sequence[Sample], expected: Sequence[Sample]) -> None:
    """Asserts that samples are equal in any order: tokens exactly, and logprobs within rounding."""
    others = {s.uid: s for s in expected}
    assert others.keys() == {s.uid for s in ours}
    for sample in ours:
        np.testing.assert_array_equal(sample.completion_ids, others[sample.uid].completion_ids)
        np.testing.assert_allclose(sample.behavior_logprobs, others[sample.uid].behavior_logprobs, atol=1e-5)


def test_records_say_whose_they_are():
    samples = generate(first_group_id=10)
    assert [s.prompt.uid for s in samples] == [p.uid for p in PROMPTS for _ in range(4)]
    assert [s.sample_index for s in samples] == [0, 1, 2, 3] * 3
    assert [s.group_id for s in samples] == [10] * 4 + [11] * 4 + [12] * 4
    for s in samples:
        assert len(s.completion_ids) == len(s.behavior_logprobs) == 6
        assert s.completion == " ".join(map(str, s.completion_ids))
        assert (s.finish_reason, s.policy_version, s.kept_mass_logs) == ("length", 3, None)
        assert (s.worker, s.segments) == ("0", 1) and s.elapsed_s > 0


@pytest.mark.parametrize(
    ("architecture", "rules"),
    [
        (ODD, SamplingRules(1.0)),
        (ODD, SamplingRules(0.6)),
        (ODD, SamplingRules(0.0)),
        (ODD, SamplingRules(0.8, top_k=9, top_p=0.9)),
        (BIASED, SamplingRules(1.5)),
    ],
    ids=["tied", "cold", "greedy", "truncated", "untied-biases"],
)
def test_the_sampler_and_the_scorer_agree_on_every_logprob(architecture, rules):
    samples = generate(architecture=architecture, rules=rules)
    plan = packed_plan(samples, quota=64, row_length=32, share_prompts=True)
    scored = scorer_of(architecture).per_token(params_of(architecture), samples, plan, temperature=rules.temperature)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=1e-4)


def test_greedy_takes_the_likeliest_token_of_a_full_forward_pass():
    definition, params = definition_of(ODD), params_of(ODD)
    hidden = jax.jit(lambda *rows: definition.bind(params).hidden(*rows, dtype=FLOAT32))
    samples = generate(rules=SamplingRules(0.0))
    for sample in samples:
        num_prompt = len(sample.prompt.token_ids)
        row = np.zeros((1, 16), np.int32)
        row[0, : num_prompt + 6] = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
        states = hidden(row, single_segment_layout(jnp.ones((1, 16), bool)))[0, num_prompt - 1 : num_prompt + 5]
        np.testing.assert_array_equal(sample.completion_ids, np.argmax(states @ params["embedding"].T, axis=-1))
    assert len(set(texts(samples).values())) == len(PROMPTS)


def test_other_prompts_in_the_batch_change_no_sample():
    others = random_prompts(3, vocab_size=ODD.vocab_size, seed=5)
    others = [replace(p, uid=f"other-{p.uid}") for p in others]
    mixed = generate([others[0], PROMPTS[1], others[2]])
    assert_same([s for s in mixed if s.prompt is PROMPTS[1]], generate()[4:8])


def test_a_longer_allowance_only_goes_on():
    for short, long in zip(generate(), generate(max_new_tokens=9), strict=True):
        np.testing.assert_array_equal(long.completion_ids[:6], short.completion_ids)


@pytest.mark.parametrize("change", [{"seed": 1}, {"policy_version": 4}])
def test_another_seed_or_policy_version_gives_other_samples(change):
    assert not set(texts(generate(**change)).values()) & set(texts(generate()).values())


def test_equal_prompts_with_different_uids_get_different_samples():
    twins = [PROMPTS[1], replace(PROMPTS[1], uid="twin"), PROMPTS[2]]
    samples = generate(twins)
    assert len({s.completion for s in samples[:8]}) == 8


def ended_by(samples: Sequence[Sample], eos_ids: Sequence[int]) -> list[tuple[list[int], str]]:
    """Returns the samples truncated at the first of the end tokens."""
    ended = []
    for sample in samples:
        ids = sample.completion_ids.tolist()
        ends = [i for i, token in enumerate(ids) if token in eos_ids]
        ended.append((ids[: ends[0] + 1], "stop") if ends else (ids, "length"))
    return ended


def eos_of(samples: Sequence[Sample]) -> tuple[int, int]:
    """Returns two tokens that end some sample in its middle; the first also occurs in a prompt, as with SmolLM2."""
    drawn = [int(s.completion_ids[3]) for s in samples]
    inside = {int(t) for p in PROMPTS for t in p.token_ids}
    first = next(t for t in drawn if t in inside)
    return first, next(t for t in drawn if t != first)


def test_every_end_of_sequence_id_ends_a_sample_and_those_in_prompts_do_not_matter():
    unending = generate()
    eos_ids = eos_of(unending)
    samples = generate(eos_ids=eos_ids)
    assert [(s.completion_ids.tolist(), s.finish_reason) for s in samples] == ended_by(unending, eos_ids)
    assert {s.finish_reason for s in samples} == {"stop", "length"}
    last = {int(s.completion_ids[-1]) for s in samples if s.finish_reason == "stop"}
    assert last == set(eos_ids)
    assert all(len(s.behavior_logprobs) == len(s.completion_ids) for s in samples)


def test_truncating_rules_record_the_mass_they_kept():
    samples = generate(rules=SamplingRules(1.0, top_k=5))
    kept = np.concatenate([np.asarray(s.kept_mass_logs) for s in samples])
    logprobs = np.concatenate([s.behavior_logprobs for s in samples])
    assert len(kept) == len(logprobs)
    assert np.all((kept < 0) & (kept > np.log(5 / ODD.vocab_size)) & (kept >= logprobs))


def test_new_rules_seeds_and_versions_never_recompile():
    generate()
    generate(rules=SamplingRules(1.0, top_k=5))
    compilations = CompilationCounter()
    for rules in (SamplingRules(0.0), SamplingRules(0.3), SamplingRules(2.0)):
        generate(rules=rules, seed=7, policy_version=9)
    for rules in (SamplingRules(0.5, top_k=3), SamplingRules(0.0, top_p=0.5), SamplingRules(1.2, 7, 0.7, 0.1)):
        generate(rules=rules, seed=8, policy_version=10)
    generate(random_prompts(3, vocab_size=ODD.vocab_size, seed=0))
    assert compilations.take_count() == 0
