"""Tests drawing tokens: noise and its keys, truncation, the search for thresholds, and a forward pass as oracle."""

import functools
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from app.model.architecture import Architecture
from app.model.decode_weights import DecodeWeights
from app.model.decoder import DecoderDefinition
from app.model.segment_layout import single_segment_layout
from app.records.sample import Sample
from app.rollout.request import GenerationRequest
from app.rollout.sampling import threshold_kernel, truncation
from app.rollout.sampling.threshold_codes import value_of_code
from app.rollout.sampling.token_sampling import (
    BLOCK_SIZE,
    MIN_BLOCKS,
    SampledTokens,
    SamplingRules,
    hash_uids,
    sample_key,
    sample_tokens,
    sample_tokens_truncated,
)
from app.rollout.sampling.truncation import kept_tokens
from app.score.scorer import Scorer
from tests.tiny import BIASED, ODD, TinyEngine, make_mesh, packed_plan, random_params, random_prompts

VOCAB, ROWS = 11, 128
sample_keys = jax.vmap(sample_key, in_axes=(None, None, 0, 0))


@functools.cache
def compiled(function: Callable[..., Any]) -> Any:
    return jax.jit(function)


def keys_of(num_rows: int, *, seed: int = 0, policy_version: int = 0, uid: str = "row") -> jax.Array:
    words = np.repeat(hash_uids([uid]), num_rows, axis=0)
    return compiled(sample_keys)(seed, policy_version, words, np.arange(num_rows, dtype=np.int32))


def draw_rows(sampler: Any, logits: Any, rules: SamplingRules, num_rows: int = ROWS) -> SampledTokens:
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (num_rows, len(logits)))
    return SampledTokens._make(map(np.asarray, compiled(sampler)(rows, rules, keys_of(num_rows))))


def slow_softmax(logits: Any) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def slow_support(logits: Any, rules: SamplingRules) -> list[int]:
    """Returns the kept token ids by one rule after the other on lists; rejects examples that depend on rounding."""
    probabilities = slow_softmax(logits)
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    kept = ranked[: rules.top_k] if rules.top_k else ranked
    if rules.top_p < 1:
        total, mass, nucleus = probabilities[kept].sum(), 0.0, []
        for i in kept:
            assume(abs(mass / total - rules.top_p) > 1e-5)
            if mass / total < rules.top_p:
                nucleus.append(i)
            mass += probabilities[i]
        kept = nucleus
    for i in kept:
        assume(i == ranked[0] or abs(probabilities[i] / probabilities.max() - rules.min_p) > 1e-5)
    return [i for i in kept if i == ranked[0] or probabilities[i] >= rules.min_p * probabilities.max()]


# XLA flushes subnormal numbers to zero, which would make different logits equal. Integers are often equal.
LOGIT = st.floats(-6, 6, width=32, allow_subnormal=False) | st.integers(-2, 2).map(float)
RULES = st.builds(
    SamplingRules,
    temperature=st.just(1.0),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1.0) | st.just(1.0),
    min_p=st.floats(0.0, 0.95) | st.just(0.0),
)


@settings(max_examples=50)
@given(st.lists(LOGIT, min_size=VOCAB, max_size=VOCAB), RULES)
def test_sampling_truncation_equals_a_slow_oracle_and_reports_the_kept_mass(logits, rules):
    support, probabilities = slow_support(logits, rules), slow_softmax(logits)
    drawn = draw_rows(sample_tokens_truncated, logits, rules)
    assert set(drawn.token_ids) <= set(support)
    np.testing.assert_allclose(drawn.kept_mass_logs, np.log(probabilities[support].sum()), atol=1e-5)
    # Logprobs are those of the whole distribution, whatever was truncated.
    np.testing.assert_allclose(drawn.logprobs, np.log(probabilities[drawn.token_ids]), atol=1e-5)
    values = jnp.asarray([logits], jnp.float32)
    kept = compiled(kept_tokens)(values, jax.nn.softmax(values), *map(jnp.asarray, rules[1:]))
    assert np.flatnonzero(kept[0]).tolist() == sorted(support)


@pytest.mark.parametrize("vocab_size", [7, MIN_BLOCKS * BLOCK_SIZE + 9], ids=["whole", "by-blocks"])
def test_samples_follow_the_softmax_and_are_greedy_at_temperature_0(vocab_size: int) -> None:
    num_rows, places = 5_000, np.linspace(0, vocab_size - 1, 7).astype(int)
    logits = np.full(vocab_size, -1e9)
    logits[places] = np.log([0.05, 0.3, 0.1, 0.01, 0.24, 0.2, 0.1])
    expected = num_rows * slow_softmax(logits)
    drawn = draw_rows(sample_tokens, logits, SamplingRules(1.0), num_rows)
    counts = np.bincount(drawn.token_ids, minlength=vocab_size)
    # chi-square of 6 degrees of freedom exceeds 27.9 once in ten thousand seeds.
    assert np.sum((counts - expected)[places] ** 2 / expected[places]) < 27.9 and counts[places].sum() == num_rows
    np.testing.assert_allclose(drawn.logprobs, logits[drawn.token_ids], atol=1e-6)
    for sampler in (sample_tokens, sample_tokens_truncated):
        assert set(draw_rows(sampler, logits, SamplingRules(0.0)).token_ids) == {places[1]}
    plain, truncating = SamplingRules(1.0), [SamplingRules(1.0, top_k=1), SamplingRules(1.0, top_p=0.99)]
    assert not plain.truncates and all(one.truncates for one in (*truncating, SamplingRules(1.0, min_p=0.01)))


def test_sampling_noise_is_keyed_by_seed_policy_version_uid_and_sample() -> None:
    def noise(**changes: Any) -> tuple:
        return tuple(map(tuple, np.asarray(jax.random.key_data(keys_of(4, **changes)))))

    variants = [noise(), noise(seed=1), noise(policy_version=1), noise(uid="other")]
    assert len({key for variant in variants for key in variant}) == 16
    assert noise() == noise()
    digest = hashlib.blake2b(b"gsm8k/7", digest_size=8).digest()
    expected = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    np.testing.assert_array_equal(hash_uids(["gsm8k/7"]), [expected], "the same in every process")
    assert hash_uids([]).shape == (0, 2)


# The search for thresholds ---------------------------------------------------------------------------------------

WIDE = 304
EXTREMES = [-np.inf, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38]


def wide_rows(num_rows: int = 8) -> np.ndarray:
    """Returns logits, half of the rows with many equal ones."""
    logits = np.random.default_rng(0).normal(size=(num_rows, WIDE)) * 3
    logits[::2] = np.round(logits[::2])
    return logits.astype(np.float32)


def slow_lowest(values: np.ndarray, weights: np.ndarray, limit: int) -> float:
    """Returns the lowest value with less than the limit above it, or minus infinity if all have."""
    if weights.sum() < limit:
        return -np.inf if values.dtype == np.float32 else 0
    return min(value for value in values if weights[values > value].sum() < limit)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("dtype", "weighs"), [(np.float32, False), (np.float32, True), (np.int32, False)])
def test_all_truncation_searches_find_the_same_threshold(dtype, weighs, monkeypatch):
    """Compares searches of one and four bits per pass, and the kernel in Pallas' interpreter."""
    rng, num_bits = np.random.default_rng(3), 32 if dtype == np.float32 else 6
    values = wide_rows(11) if dtype == np.float32 else rng.integers(0, 40, (11, WIDE)).astype(dtype)
    if dtype == np.float32:
        values[1:4, : len(EXTREMES)] = EXTREMES
        values[4] = -np.inf
    weights = rng.integers(0, 1000, values.shape).astype(np.int32) if weighs else None
    held = np.ones_like(values, np.int32) if weights is None else weights
    limits = np.array([1, 2, 50, 303, 304, 305, 10**6, 7, 30, 100, 200], np.int32)
    expected = [slow_lowest(*row) for row in zip(values, held, limits, strict=True)]
    for bits in (1, 4):
        monkeypatch.setitem(truncation.BITS_PER_PASS, "cpu", bits)
        by_passes = jax.jit(functools.partial(truncation.lowest_reached, num_bits=num_bits))(values, weights, limits)
        np.testing.assert_array_equal(np.asarray(by_passes), expected)
    kernel = functools.partial(threshold_kernel.search, num_bits=num_bits, available_bytes=2**24)
    codes = jax.jit(kernel)(values, weights, limits)
    np.testing.assert_array_equal(np.asarray(value_of_code(codes, values.dtype)), expected)
    v4, v5e = 16 * 2**20, 96 * 2**20
    assert [threshold_kernel.num_buffers(151_936, size) for size in (v4, v5e)] == [1, 2], "blocks fit the chip's memory"
    assert threshold_kernel.num_buffers(262_144, v4) == 0


def test_non_finite_logits_of_a_row_do_not_affect_other_rows() -> None:
    logits, rules = wide_rows(16), SamplingRules(1.0, 20, 0.9, 0.01)
    logits[1, 5], logits[2, 6] = np.nan, np.inf
    keys, sampler = jax.random.split(jax.random.key(0), 16), compiled(sample_tokens_truncated)
    drawn, expected = sampler(logits, rules, keys), sampler(wide_rows(16), rules, keys)
    is_whole = ~np.isin(np.arange(16), [1, 2])
    np.testing.assert_array_equal(np.isfinite(drawn.logprobs), is_whole)
    np.testing.assert_array_equal(drawn.token_ids[is_whole], expected.token_ids[is_whole])


# Whole samples -------------------------------------------------------------------------------------------------

PROMPTS = random_prompts(3, vocab_size=ODD.vocab_size)
REQUEST = GenerationRequest(group_size=4, max_new_tokens=6, rules=SamplingRules(1.0), seed=5, policy_version=3)


@functools.cache
def engine_of(architecture: Architecture, eos_ids: tuple[int, ...] = ()) -> tuple[TinyEngine, DecodeWeights]:
    definition = DecoderDefinition.create(architecture)
    engine = TinyEngine(definition, eos_ids=eos_ids)
    return engine, engine.to_decode_weights(random_params(definition))


def generate(*, architecture: Architecture = ODD, eos_ids: tuple[int, ...] = (), **changes: Any) -> list[Sample]:
    engine, weights = engine_of(architecture, eos_ids)
    return engine.generate(weights, PROMPTS, replace(REQUEST, **changes))


@pytest.mark.parametrize(
    ("architecture", "rules"),
    [(ODD, (0.0,)), (ODD, (0.8, 9, 0.9)), (replace(BIASED, num_layers=1), (1.5,))],
    ids=["greedy", "truncated", "untied-biases"],
)
def test_sampler_and_scorer_agree_on_every_logprob(architecture: Architecture, rules: Sequence[Any]) -> None:
    sampling, definition = SamplingRules(*rules), DecoderDefinition.create(architecture)
    samples = generate(architecture=architecture, rules=sampling)
    plan = packed_plan(samples, quota=64, row_length=32, share_prompts=True)
    scorer = Scorer(definition, make_mesh(), dtype=jnp.dtype("float32"), logits_chunk=5)
    scored = scorer.per_token(random_params(definition), samples, plan, temperature=sampling.temperature)
    for sample, logprobs in zip(samples, scored, strict=True):
        np.testing.assert_allclose(sample.behavior_logprobs, logprobs, atol=1e-4)
        kept = sample.kept_mass_logs
        assert (kept is not None) == sampling.truncates
        assert kept is None or np.all((kept < 0) & (kept > np.log(9 * 0.9 / ODD.vocab_size)) & (kept >= logprobs))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_sampled_tokens_maximize_forward_logits_plus_positional_noise(temperature: float) -> None:
    definition = DecoderDefinition.create(ODD)
    params = random_params(definition)
    hidden = jax.jit(lambda *rows: definition.bind(params).hidden(*rows, dtype=jnp.dtype("float32")))
    for sample in generate(rules=SamplingRules(temperature)):
        num_prompt = len(sample.prompt.token_ids)
        row = np.zeros((1, 16), np.int32)
        row[0, : num_prompt + 6] = np.concatenate([sample.prompt.token_ids, sample.completion_ids])
        states = hidden(row, single_segment_layout(jnp.ones((1, 16), bool)))[0, num_prompt - 1 : num_prompt + 5]
        values = states @ params["embedding"].T
        if temperature:
            key = sample_key(5, 3, hash_uids([sample.prompt.uid])[0], sample.sample_index)  # pyright: ignore[reportArgumentType]
            positions = num_prompt + jnp.arange(6)
            noise = [jax.random.gumbel(jax.random.fold_in(key, place), (ODD.vocab_size,)) for place in positions]
            values = values / temperature + jnp.stack(noise)
        np.testing.assert_array_equal(sample.completion_ids, np.argmax(values, axis=-1))


def test_every_eos_token_ends_a_sample_except_in_prompts() -> None:
    unending = generate()
    in_prompts = {int(t) for p in PROMPTS for t in p.token_ids}
    # One EOS token is the first of a sample, one also occurs in a prompt, as with SmolLM2, and one is neither.
    first, drawn = int(unending[0].completion_ids[0]), [s.completion_ids.tolist() for s in unending]
    within = next(ids[3] for ids in drawn if first not in ids[:4] and ids[3] in in_prompts)
    eos_ids = first, within, next(ids[3] for ids in drawn if not {first, within} & set(ids[:4]))
    expected = []
    for ids in (s.completion_ids.tolist() for s in unending):
        ends = [i for i, token in enumerate(ids) if token in eos_ids]
        expected.append((ids[: ends[0] + 1], "stop") if ends else (ids, "length"))
    samples = generate(eos_ids=eos_ids, first_group_id=10)
    assert [s.group_id for s in samples] == [10] * 4 + [11] * 4 + [12] * 4
    assert [(s.completion_ids.tolist(), s.finish_reason) for s in samples] == expected
    assert {s.finish_reason for s in samples} == {"stop", "length"} and len(samples[0].completion_ids) == 1
    assert {int(s.completion_ids[-1]) for s in samples if s.finish_reason == "stop"} == set(eos_ids)
    assert all(len(s.behavior_logprobs) == len(s.completion_ids) for s in samples)
