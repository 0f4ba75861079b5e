"""Tests of the ratios of samples against float64, for any packing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.update.loss_aggregation import AggregationFn, StepTotals, sequence_mean_token_mean, token_mean
from app.update.policy_loss import PolicyLoss, SurrogateFn, cispo_surrogate, clipped_surrogate
from app.update.ratios import sequence_log_ratio, token_log_ratio
from tests.tiny import PLAIN_LOSS, assert_trees_close, pack_update
from tests.update.table_policy import loss_and_gradient
from tests.update.test_policy_loss import LAYOUTS, SAMPLES, STARTS, TABLE, WHOLE

LOW, HIGH = 3e-4, 4e-4
GSPO = replace(
    PLAIN_LOSS, surrogate=partial(clipped_surrogate, clip_low=LOW, clip_high=HIGH), log_ratio=sequence_log_ratio
)
CISPO_LOW, CISPO_HIGH = 10.0, 0.2
CISPO = replace(PLAIN_LOSS, surrogate=partial(cispo_surrogate, clip_low=CISPO_LOW, clip_high=CISPO_HIGH))


def near(scale: float):
    """Returns samples scored by a policy near the table's, with which some ratios are clipped."""
    rng = np.random.default_rng(3)

    def scored(sample, start):
        logits = TABLE[start : start + len(sample.completion_ids)].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        chosen = logprobs[np.arange(len(logits)), sample.completion_ids]
        return replace(sample, policy_logprobs=(chosen + rng.normal(0, scale, len(chosen))).astype(np.float32))

    return [scored(s, start) for s, start in zip(SAMPLES, STARTS[:-1], strict=True)]


def oracle(samples, weights: AggregationFn, term) -> tuple[float, np.ndarray]:
    """Computes loss and gradient in float64; `term` maps a sample's logprobs to token losses and slopes."""
    totals = StepTotals.from_samples(samples)
    loss, gradient = 0.0, np.zeros(TABLE.shape)
    for sample, start in zip(samples, STARTS[:-1], strict=True):
        logits = TABLE[start : start + len(sample.completion_ids)].astype(np.float64)
        probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        chosen = np.eye(logits.shape[1])[sample.completion_ids]
        current = np.log((probabilities * chosen).sum(-1))
        counted = weights(sample, totals).astype(np.float64)
        losses, slopes = term(sample, current)
        loss += float(counted @ losses)
        gradient[start : start + len(logits)] = (counted * slopes)[:, None] * (chosen - probabilities)
    return loss, gradient


def gspo_term(sample, current):
    """Computes the terms of GSPO. Source: Zheng et al. 2025, eqs. 7 and 14."""
    difference = (current - sample.policy_logprobs)[sample.mask]
    ratio = np.exp(difference.mean()) if len(difference) else 1.0
    advantages = sample.advantages.astype(np.float64)
    plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, 1 - LOW, 1 + HIGH)
    return np.maximum(plain, clipped), np.where(plain >= clipped, plain, 0.0)


def cispo_term(sample, current):
    """Computes the terms of CISPO. Source: MiniMax 2025, eqs. 4 and 5."""
    ratio = np.exp(current - sample.policy_logprobs)
    weights = np.clip(ratio, 1 - CISPO_LOW, 1 + CISPO_HIGH) * sample.advantages
    return -weights * current, -weights


@pytest.mark.parametrize(
    ("loss", "term", "weights", "scale"),
    [
        (GSPO, gspo_term, sequence_mean_token_mean, 3e-3),
        (GSPO, gspo_term, token_mean, 3e-3),
        (CISPO, cispo_term, token_mean, 0.5),
    ],
    ids=["gspo", "gspo over tokens", "cispo"],
)
def test_loss_and_gradient_equal_their_papers_in_float64_however_samples_are_packed(
    loss: PolicyLoss, term, weights: AggregationFn, scale: float
):
    samples = near(scale)
    expected_loss, expected = oracle(samples, weights, term)
    for layout in (WHOLE, *LAYOUTS):
        gradient, parts = loss_and_gradient(loss, TABLE, samples, layout, weights=weights)
        assert float(parts.sums["loss"]) == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert_trees_close(gradient, expected)
        clipped = float(parts.sums["policy/clip_fraction_high"]) + float(parts.sums["policy/clip_fraction_low"])
        assert 0.05 < clipped < 0.95


def test_a_mean_over_a_sample_is_beside_all_of_its_targets_and_sees_nothing_else():
    for layout in (WHOLE, *LAYOUTS):
        for batch, micro_batch in zip(pack_update(SAMPLES, layout), layout.micro_batches, strict=True):
            assert batch.sample_reducer is not None
            # A huge value outside of the mask: other samples' tokens stand right beside it.
            values = jnp.where(batch.tokens.loss_mask, batch.behavior_logprobs, 1e30)
            means = np.asarray(jax.jit(lambda means, x: means.mean(x))(batch.sample_reducer, values))
            for row, segments in zip(means, micro_batch.rows, strict=True):
                at = 0
                for i in (i for segment in segments for i in segment):
                    length = len(SAMPLES[i].completion_ids)
                    written = SAMPLES[i].behavior_logprobs[SAMPLES[i].mask].astype(np.float64)
                    expected = written.mean() if len(written) else 0.0
                    np.testing.assert_allclose(row[at : at + length], expected, rtol=1e-6)
                    at += length


@pytest.mark.parametrize("surrogate", [GSPO.surrogate, CISPO.surrogate])
@pytest.mark.parametrize("log_ratio", [token_log_ratio, sequence_log_ratio])
def test_with_one_update_every_kind_of_ratio_is_exactly_one_and_the_gradient_that_of_reinforce(
    surrogate: SurrogateFn, log_ratio
):
    loss = replace(PLAIN_LOSS, surrogate=surrogate, log_ratio=log_ratio)
    unscored = [replace(sample, policy_logprobs=None) for sample in SAMPLES]
    gradient, parts = loss_and_gradient(loss, TABLE, unscored, LAYOUTS[1], weights=token_mean)
    assert float(parts.maxima["policy/ratio_max"]) == 1.0
    _, expected = oracle(SAMPLES, token_mean, lambda sample, current: (current, -sample.advantages))
    assert_trees_close(gradient, expected)
