from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.forward_passes import row_logprobs
from app.model.decoder import DecoderDefinition
from app.records.sample import Sample
from app.update.kl import KLEstimator, k1, k3
from app.update.loss_aggregation import AggregationFn, sequence_mean_token_mean, token_mean
from app.update.policy_loss import PolicyBatch, detached_logprobs, make_policy_objective, scored_logprobs
from tests.tiny import (
    ODD,
    PLAIN_LOSS,
    assert_trees_close,
    make_sample,
    one_a_row,
    pack_update,
    plan_of,
    random_params,
    random_samples,
)

DEFINITION = DecoderDefinition.create(replace(ODD, num_layers=1))
SAMPLES = random_samples(2, 2, vocab_size=ODD.vocab_size, with_holes=True)
SIZES = {"rows_per_micro_batch": 4, "num_tokens": 32, "num_targets": 20}
FORWARD = {"dtype": jnp.dtype("float32"), "remat": "none", "logits_chunk": 6}


@functools.cache
def params():
    return random_params(DEFINITION)


def micro_batch(samples: Sequence[Sample], *, weights: AggregationFn = token_mean) -> PolicyBatch:
    """Returns a micro-batch of four rows with one sample each, without policy and reference logprobs."""
    (batch,) = pack_update(samples, one_a_row(len(samples), **SIZES), weights=weights)
    return replace(batch, policy_logprobs=None, reference_logprobs=None)


def with_reference(samples: Sequence[Sample], *, weights: AggregationFn = token_mean) -> PolicyBatch:
    (batch,) = pack_update(samples, one_a_row(len(samples), **SIZES), weights=weights)
    return replace(batch, policy_logprobs=None)


@functools.cache
def loss_and_gradient(
    beta: float = 0.0, several: bool = False, kl_estimator: KLEstimator | None = None, entropy_coef: float = 0.0
):
    """Returns loss and gradient; with `beta` the penalty is in the loss, with only `kl_estimator` it is measured."""
    loss = replace(
        PLAIN_LOSS,
        proximal_logprobs_fn=scored_logprobs if several else detached_logprobs,
        kl_estimator=k3 if beta else kl_estimator,
        beta=beta,
        entropy_coef=entropy_coef,
    )
    return jax.jit(jax.value_and_grad(make_policy_objective(DEFINITION, loss, **FORWARD), has_aux=True))


@jax.jit
def logprobs_of(params, batch: PolicyBatch):
    return row_logprobs(DEFINITION.bind(params), batch.tokens, temperature=1.3, **FORWARD)[:2]


def test_two_samples_in_one_row_lose_minus_two_and_a_quarter():
    # Means of their own tokens: 1.5 and 3.0; pooled over the row it would be 1.875.
    samples = [
        make_sample([3, 4, 5], advantages=np.full(3, 1.5, np.float32)),
        make_sample([6], advantages=np.full(1, 3.0, np.float32), sample_index=1),
    ]
    (batch,) = pack_update(samples, plan_of([(0, 1)], **SIZES), weights=sequence_mean_token_mean)
    (loss, parts), _ = loss_and_gradient()(params(), batch, 1.0)
    assert float(loss) == pytest.approx(-2.25, rel=1e-6)
    assert float(parts.sums["loss"]) == float(loss)


@pytest.mark.parametrize("weights", [token_mean, sequence_mean_token_mean])
def test_a_batch_whose_tokens_are_all_masked_has_no_loss_and_no_gradient(weights):
    samples = [replace(s, loss_mask=np.zeros(len(s.completion_ids), bool)) for s in SAMPLES]
    (loss, parts), gradient = loss_and_gradient()(params(), micro_batch(samples, weights=weights), 1.0)
    assert float(loss) == 0.0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))
    assert all(float(x) == 0.0 for x in jax.tree.leaves(parts))


def test_padding_rows_alone_have_no_gradient():
    batch = jax.tree.map(lambda x: np.zeros_like(x), micro_batch(SAMPLES))
    (loss, _), gradient = loss_and_gradient()(params(), batch, 1.0)
    assert float(loss) == 0.0
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))


def test_with_one_update_the_ratio_is_exactly_one_whatever_the_sampler_said():
    (_, parts), _ = loss_and_gradient()(params(), micro_batch(SAMPLES), 1.3)
    assert float(parts.maxima["policy/ratio_max"]) == 1.0
    assert float(parts.sums["policy/clip_fraction_low"]) == 0.0
    assert float(parts.sums["policy/clip_fraction_high"]) == 0.0


def test_at_ratio_one_loss_and_gradient_are_those_of_reinforce():
    batch = micro_batch(SAMPLES)

    def reinforce(params):
        logprobs, _ = logprobs_of(params, batch)
        return -jnp.sum(batch.loss_weights * batch.advantages * logprobs)

    (loss, _), gradient = loss_and_gradient()(params(), batch, 1.3)
    assert_trees_close(gradient, jax.jit(jax.grad(reinforce))(params()))
    assert float(loss) == pytest.approx(-float(np.sum(batch.loss_weights * batch.advantages)), rel=1e-5)


def test_with_several_updates_the_ratio_is_taken_to_the_scored_logprobs():
    batch = micro_batch(SAMPLES)
    scored = np.asarray(logprobs_of(params(), batch)[0])
    (_, same), _ = loss_and_gradient(several=True)(params(), replace(batch, policy_logprobs=scored), 1.3)
    assert float(same.maxima["policy/ratio_max"]) == pytest.approx(1.0, abs=1e-5)
    # Twice as likely now as when they were scored: everything with a positive advantage is clipped.
    halved = replace(batch, policy_logprobs=scored - np.float32(np.log(2)))
    (_, moved), _ = loss_and_gradient(several=True)(params(), halved, 1.3)
    assert float(moved.maxima["policy/ratio_max"]) == pytest.approx(2.0, rel=1e-5)
    expected = float(np.sum(batch.token_weights * (batch.advantages > 0)))
    assert float(moved.sums["policy/clip_fraction_high"]) == pytest.approx(expected, rel=1e-5)
    assert float(moved.sums["policy/clip_fraction_low"]) == 0.0


def test_metrics_are_means_over_the_tokens_that_the_policy_wrote():
    batch = micro_batch(SAMPLES)
    logprobs, entropy = (np.asarray(x, np.float64) for x in logprobs_of(params(), batch))
    mask = np.asarray(batch.tokens.loss_mask)
    difference = np.abs(logprobs - batch.behavior_logprobs)[mask]
    (_, parts), _ = loss_and_gradient()(params(), batch, 1.3)
    assert float(parts.sums["policy/entropy"]) == pytest.approx(entropy[mask].mean(), rel=1e-5)
    name = "rollout/sampler_scorer_logprob_diff"
    assert float(parts.sums[f"{name}_mean"]) == pytest.approx(difference.mean(), rel=1e-5)
    assert float(parts.maxima[f"{name}_max"]) == pytest.approx(difference.max(), rel=1e-5)
    assert "policy/kl" not in parts.sums


def test_the_penalty_adds_beta_times_the_weighted_estimate():
    batch = with_reference(SAMPLES, weights=sequence_mean_token_mean)
    mask, reference = np.asarray(batch.tokens.loss_mask), jnp.asarray(batch.reference_logprobs)

    def penalty(params):
        logprobs, _ = logprobs_of(params, batch)
        return jnp.sum(batch.loss_weights * jnp.where(mask, k3(logprobs, reference), 0.0))

    (without, _), plain = loss_and_gradient()(params(), replace(batch, reference_logprobs=None), 1.3)
    (loss, parts), gradient = loss_and_gradient(beta=0.25)(params(), batch, 1.3)
    extra, slope = jax.jit(jax.value_and_grad(penalty))(params())
    assert float(loss) == pytest.approx(float(without + 0.25 * extra), rel=1e-5)
    assert_trees_close(gradient, jax.tree.map(lambda a, b: a + 0.25 * b, plain, slope))
    estimates = np.asarray(k3(logprobs_of(params(), batch)[0], reference))[mask]
    assert float(parts.sums["policy/kl"]) == pytest.approx(estimates.mean(), rel=1e-4)


def test_a_penalty_that_the_reward_holds_is_measured_and_changes_nothing():
    batch = with_reference(SAMPLES)
    (loss, parts), gradient = loss_and_gradient(kl_estimator=k1)(params(), batch, 1.3)
    (plain_loss, _), plain = loss_and_gradient()(params(), replace(batch, reference_logprobs=None), 1.3)
    assert float(loss) == float(plain_loss)
    assert_trees_close(gradient, plain)
    mask = np.asarray(batch.tokens.loss_mask)
    estimates = (np.asarray(logprobs_of(params(), batch)[0]) - batch.reference_logprobs)[mask]
    assert float(parts.sums["policy/kl"]) == pytest.approx(estimates.mean(), rel=1e-5)


def test_the_bonus_takes_the_weighted_entropy_from_the_loss():
    batch = micro_batch(SAMPLES, weights=sequence_mean_token_mean)

    def bonus(params):
        tokens = batch.tokens
        _, entropies, _ = row_logprobs(
            DEFINITION.bind(params), tokens, temperature=1.3, entropy_gradient=True, **FORWARD
        )
        return jnp.sum(batch.loss_weights * entropies)

    (without, _), plain = loss_and_gradient()(params(), batch, 1.3)
    (loss, parts), gradient = loss_and_gradient(entropy_coef=0.5)(params(), batch, 1.3)
    extra, slope = jax.jit(jax.value_and_grad(bonus))(params())
    assert float(extra) > 0.1
    assert float(loss) == pytest.approx(float(without - 0.5 * extra), rel=1e-5)
    assert_trees_close(gradient, jax.tree.map(lambda a, b: a - 0.5 * b, plain, slope))
    assert float(parts.sums["loss"]) == float(loss)


def test_tokens_outside_the_mask_say_nothing():
    def spoil(sample: Sample) -> Sample:
        def spoiled(values, fill: float) -> np.ndarray:
            return np.where(sample.mask, values, np.float32(fill))

        return replace(
            sample,
            advantages=spoiled(sample.advantages, 99),
            behavior_logprobs=spoiled(sample.behavior_logprobs, -77),
            reference_logprobs=spoiled(sample.reference_logprobs, -55),
        )

    spoiled = [spoil(s) for s in SAMPLES]
    assert any(not s.mask.all() for s in SAMPLES)
    expected, ours = (
        loss_and_gradient(beta=0.25, entropy_coef=0.5)(params(), with_reference(samples), 1.3)
        for samples in (SAMPLES, spoiled)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, expected)
