from __future__ import annotations

import functools
import hashlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from app.rollout.sampling.token_sampling import (
    SampledTokens,
    SamplingRules,
    hash_uids,
    sample_key,
    sample_tokens,
    sample_tokens_truncated,
)

VOCAB, ROWS = 11, 128
sample_keys = jax.vmap(sample_key, in_axes=(None, None, 0, 0))


@functools.cache
def compiled(sampler):
    return jax.jit(sampler)


def keys_of(num_rows: int, *, seed=0, policy_version=0, uid="row") -> jax.Array:
    """Returns the keys of this many samples of one prompt."""
    words = np.repeat(hash_uids([uid]), num_rows, axis=0)
    return compiled(sample_keys)(seed, policy_version, words, np.arange(num_rows, dtype=np.int32))


def draw_rows(sampler, logits, rules: SamplingRules, num_rows: int = ROWS) -> SampledTokens:
    """Draws many tokens from the same logits."""
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (num_rows, len(logits)))
    return SampledTokens._make(map(np.asarray, compiled(sampler)(rows, rules, keys_of(num_rows))))


def slow_softmax(logits) -> np.ndarray:
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def slow_support(logits, rules: SamplingRules) -> list[int]:
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


# XLA takes subnormal numbers for zero, so that logits which they tell apart are equal.
LOGITS = st.lists(st.floats(-6, 6, width=32, allow_subnormal=False), min_size=VOCAB, max_size=VOCAB)
RULES = st.builds(
    SamplingRules,
    temperature=st.just(1.0),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.floats(0.01, 1.0) | st.just(1.0),
    min_p=st.floats(0.0, 0.95) | st.just(0.0),
)


@given(LOGITS, RULES)
def test_truncation_keeps_the_tokens_of_a_slow_oracle_and_reports_their_mass(logits, rules):
    support, probabilities = slow_support(logits, rules), slow_softmax(logits)
    drawn = draw_rows(sample_tokens_truncated, logits, rules)
    assert set(drawn.token_ids) <= set(support)
    np.testing.assert_allclose(drawn.kept_mass_logs, np.log(probabilities[support].sum()), atol=1e-5)
    # Of the whole distribution, whatever was cut.
    np.testing.assert_allclose(drawn.logprobs, np.log(probabilities[drawn.token_ids]), atol=1e-5)


@pytest.mark.parametrize(
    ("rules", "support"),
    [
        (SamplingRules(1.0, top_k=1), {1}),
        (SamplingRules(1.0, top_k=3), {1, 3, 4}),
        (SamplingRules(1.0, top_k=99), {0, 1, 2, 3, 4}),
        (SamplingRules(1.0, top_p=1e-6), {1}),
        (SamplingRules(1.0, top_p=0.45), {1, 3}),
        (SamplingRules(1.0, top_p=0.75), {1, 3, 4}),
        (SamplingRules(1.0, min_p=0.3), {1, 3, 4}),
        (SamplingRules(1.0, min_p=0.9), {1}),
        # .4 .3 .15 are left of top-k; half of their mass is .425.
        (SamplingRules(1.0, top_k=3, top_p=0.5), {1, 3}),
        (SamplingRules(1.0, top_p=0.9, min_p=0.6), {1, 3}),
        (SamplingRules(0.0, top_k=4), {1}),
    ],
)
def test_supports_by_hand(rules, support):
    logits = np.log([0.05, 0.4, 0.1, 0.3, 0.15])
    assert set(draw_rows(sample_tokens_truncated, logits, rules, num_rows=1000).token_ids) == support


def test_equal_logits_are_ranked_by_token_id():
    drawn = draw_rows(sample_tokens_truncated, [0.0] * 5, SamplingRules(1.0, top_k=2), num_rows=200)
    assert set(drawn.token_ids) == {0, 1}


@pytest.mark.parametrize("sampler", [sample_tokens, sample_tokens_truncated])
def test_greedy_takes_the_likeliest_token_and_its_logprob(sampler):
    logits = np.random.default_rng(0).normal(size=(ROWS, VOCAB)).astype(np.float32)
    drawn = compiled(sampler)(logits, SamplingRules(0.0), keys_of(ROWS))
    np.testing.assert_array_equal(drawn.token_ids, logits.argmax(axis=-1))
    expected = [np.log(slow_softmax(row).max()) for row in logits]
    np.testing.assert_allclose(drawn.logprobs, expected, atol=1e-6)


def test_rules_that_cut_nothing_draw_the_same_tokens_as_the_plain_sampler():
    logits = np.random.default_rng(1).normal(size=VOCAB)
    plain = draw_rows(sample_tokens, logits, SamplingRules(1.0))
    full = draw_rows(sample_tokens_truncated, logits, SamplingRules(1.0, top_k=VOCAB))
    np.testing.assert_array_equal(plain.token_ids, full.token_ids)
    np.testing.assert_allclose(plain.logprobs, full.logprobs, atol=1e-6)
    np.testing.assert_allclose(full.kept_mass_logs, 0.0, atol=1e-6)


@pytest.mark.parametrize(
    ("sampler", "rules", "support"),
    [
        (sample_tokens, SamplingRules(1.0), [0, 1, 2, 3, 4, 5, 6]),
        (sample_tokens_truncated, SamplingRules(1.0, top_k=4, top_p=0.8), [1, 4, 5]),
    ],
)
def test_frequencies_match_probabilities(sampler, rules, support):
    num_rows, logits = 20_000, np.log([0.05, 0.3, 0.1, 0.01, 0.24, 0.2, 0.1])
    expected = slow_softmax(logits)[support]
    expected = num_rows * expected / expected.sum()
    counts = np.bincount(draw_rows(sampler, logits, rules, num_rows).token_ids, minlength=len(logits))[support]
    # chi-square of at most 6 degrees of freedom exceeds 27.9 once in ten thousand seeds.
    assert np.sum((counts - expected) ** 2 / expected) < 27.9
    assert counts.sum() == num_rows


def test_noise_follows_seed_policy_version_uid_and_sample_and_nothing_else():
    def noise(**changes) -> tuple:
        return tuple(map(tuple, np.asarray(jax.random.key_data(keys_of(4, **changes)))))

    variants = [noise(), noise(seed=1), noise(policy_version=1), noise(uid="other")]
    assert len({key for variant in variants for key in variant}) == 16
    assert noise() == noise()


def test_uids_become_the_same_words_in_every_process():
    digest = hashlib.blake2b(b"gsm8k/7", digest_size=8).digest()
    expected = [int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")]
    np.testing.assert_array_equal(hash_uids(["gsm8k/7"]), [expected])
    assert hash_uids([]).shape == (0, 2)


def test_only_rules_that_can_exclude_a_token_pay_for_the_search():
    assert not any(rules.truncates for rules in (SamplingRules(1.0), SamplingRules(0.0)))
    truncating = SamplingRules(1.0, top_k=1), SamplingRules(1.0, top_p=0.99), SamplingRules(1.0, min_p=0.01)
    assert all(rules.truncates for rules in truncating)
