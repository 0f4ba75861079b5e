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
from app.update.policy_loss import PolicyBatch, make_policy_objective
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
def loss_and_gradient(beta: float = 0.0, kl_estimator: KLEstimator | None = None, entropy_coef: float = 0.0):
    """Returns loss and gradient; with `beta` the penalty is in the loss, with only `kl_estimator` it is measured."""
    loss = replace(
        PLAIN_LOSS,
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


def test_a_penalty_that_the_reward_holds_is_measured_and_changes_nothing():
    batch = with_reference(SAMPLES)
    (loss, parts), gradient = loss_and_gradient(kl_estimator=k1)(params(), batch, 1.3)
    (plain_loss, _), plain = loss_and_gradient()(params(), replace(batch, reference_logprobs=None), 1.3)
    assert float(loss) == float(plain_loss)
    assert_trees_close(gradient, plain)
    mask = np.asarray(batch.tokens.loss_mask)
    estimates = (np.asarray(logprobs_of(params(), batch)[0]) - batch.reference_logprobs)[mask]
    assert float(parts.sums["policy/kl"]) == pytest.approx(estimates.mean(), rel=1e-5)


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
