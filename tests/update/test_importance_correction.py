"""Tests the importance correction against hand-computed and float64 values, packed and on-policy."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.token_batch import pack_per_token
from app.records.sample import Sample
from app.update import ratios
from app.update.kl import k3
from app.update.updater import make_sample_reducer
from tests.tiny import PLAIN_LOSS, assert_trees_close, make_sample, plan_of
from tests.update.table_policy import (
    AGGREGATIONS,
    CURRENT,
    LAYOUTS,
    SAMPLES,
    SHARED_ROWS,
    STARTS,
    TABLE,
    loss_and_gradient,
    oracle,
    over_tokens,
)

MIN, MAX, VETO = 0.7, 1.4, 0.4
BOUNDS: dict[str, ratios.BoundFn] = {
    "truncate": partial(ratios.truncate_weights, max_weight=MAX),
    "mask": partial(ratios.mask_weights, min_weight=MIN, max_weight=MAX),
}
KINDS = [("truncate", "token"), ("mask", "sequence"), ("truncate", "geometric"), ("mask", "token")]
BETA, ENTROPY_COEF = 0.3, 0.2
# The correction applies neither to the KL penalty nor to the entropy bonus.
PENALIZED = replace(PLAIN_LOSS, kl_estimator=k3, beta=BETA, entropy_coef=ENTROPY_COEF)


def stale() -> list[Sample]:
    """Returns samples whose sampler, scored policy and table policy have slightly different logprobs."""
    rng = np.random.default_rng(7)

    def drawn(sample: Sample, current: np.ndarray) -> Sample:
        scored = current + rng.normal(0, 0.2, len(current))
        behavior = scored + rng.normal(0, 0.5, len(current))
        return replace(sample, policy_logprobs=scored.astype(np.float32), behavior_logprobs=behavior.astype(np.float32))

    return [drawn(s, current) for s, current in zip(SAMPLES, CURRENT, strict=True)]


class Weights(NamedTuple):
    """The importance weights of a sample's tokens in float64."""

    bounded: np.ndarray
    unbounded: np.ndarray
    cut: np.ndarray
    vetoed: np.ndarray


def float64_weights(sample: Sample, kind: str, level: str, veto: float) -> Weights:
    difference = np.asarray(sample.policy_logprobs, np.float64) - sample.behavior_logprobs
    written = difference[sample.mask]
    log_w = {
        "token": difference,
        "sequence": np.full_like(difference, written.sum()),
        "geometric": np.full_like(difference, written.mean() if len(written) else 0.0),
    }[level]
    w = np.exp(np.clip(log_w, -20, 20))
    cut = w > MAX if kind == "truncate" else (w < MIN) | (w > MAX)
    vetoed = np.full_like(cut, (np.exp(written) < veto).any())
    bounded = np.minimum(w, MAX) if kind == "truncate" else np.where(cut, 0.0, w)
    return Weights(np.where(vetoed, 0.0, bounded), w, cut, vetoed)


def sample_of(log_weights: Sequence[float], mask: Sequence[bool] | None = None) -> Sample:
    """Returns a sample with these log weights under a policy whose logprobs are 0."""
    values = np.asarray(log_weights, np.float32)
    loss_mask = None if mask is None else np.asarray(mask)
    return make_sample(np.zeros(len(values), np.int32), behavior_logprobs=-values, loss_mask=loss_mask)


def corrected(correction: ratios.ImportanceCorrection, samples: Sequence[Sample]) -> ratios.CorrectedWeights:
    """Returns the corrected weights of all samples, packed into one row in their order."""
    (micro_batch,) = plan_of([range(len(samples))], rows_per_micro_batch=1, num_tokens=40, num_targets=16).micro_batches
    log_weights = pack_per_token(samples, micro_batch, lambda s: np.where(s.mask, -s.behavior_logprobs, 0.0))
    found = jax.jit(correction)(log_weights, make_sample_reducer(samples, micro_batch))
    length = sum(len(s.completion_ids) for s in samples)
    return jax.tree.map(lambda x: np.asarray(x)[0, :length].tolist(), found)


LOG_2 = float(np.log(2.0))
BY_HAND = (
    # The weights are 2, 1/4, 1 and 4 in the first sample, whose masked token has 8, and 1/2 and 1/2 in the second.
    sample_of([LOG_2, -2 * LOG_2, 3 * LOG_2, 0.0, 2 * LOG_2], [True, True, False, True, True]),
    sample_of([-LOG_2, -LOG_2]),
)


@pytest.mark.parametrize("level", ratios.LOG_WEIGHTS)
def test_one_unlikely_unmasked_token_vetoes_its_whole_sample(level: str):
    correction = ratios.ImportanceCorrection(ratios.LOG_WEIGHTS[level], BOUNDS["truncate"], veto=0.3)
    found = corrected(correction, BY_HAND)
    assert found.vetoed == [True] * 5 + [False] * 2
    assert list(found.weights[:5]) == [0.0] * 5 and min(found.weights[5:]) > 0.2
    by_tool = sample_of([0.0, -15.0], [True, False])
    assert not any(corrected(correction, [by_tool]).vetoed)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_importance_weights_of_distant_policies_are_finite(kind: str, level: str):
    far = [sample_of([80.0] * 3), sample_of([-80.0] * 3)]
    found = corrected(ratios.ImportanceCorrection(ratios.LOG_WEIGHTS[level], BOUNDS[kind]), far)
    assert found.unbounded_weights == pytest.approx([np.exp(20)] * 3 + [np.exp(-20)] * 3, rel=1e-6)
    assert np.isfinite(found.weights).all()


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_corrected_loss_gradient_and_metrics_equal_float64_for_any_packing(kind: str, level: str):
    number, samples = KINDS.index((kind, level)), stale()
    aggregation, veto = list(AGGREGATIONS.values())[number], VETO if number else 0.0
    weights = {s.uid: float64_weights(s, kind, level, veto) for s in samples}

    def term(sample: Sample, current: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratio, advantages = np.exp(current - sample.policy_logprobs), np.asarray(sample.advantages, np.float64)
        plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.3)
        w, d = weights[sample.uid].bounded, current - sample.reference_logprobs
        losses = w * np.maximum(plain, clipped) + BETA * (np.exp(-d) - 1 + d)
        return losses, w * np.where(plain >= clipped, plain, 0.0) + BETA * (1 - np.exp(-d))

    loss, expected_gradient = oracle(samples, aggregation, term, entropy_coef=ENTROPY_COEF)
    w, unbounded, cut, vetoed = (over_tokens(samples, columns) for columns in zip(*weights.values(), strict=True))
    expected = {
        "loss": loss,
        "policy/correction_mean": w.mean(),
        "policy/correction_max": unbounded.max(),
        "policy/correction_cut_fraction": cut.mean(),
        "policy/veto_fraction": vetoed.mean(),
        "policy/correction_ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    assert 0 < cut.mean() < 1 and 0 < expected["policy/correction_ess"] < 1
    assert (0 < vetoed.mean() < 1) == (veto > 0)
    ours = replace(PENALIZED, correction=ratios.ImportanceCorrection(ratios.LOG_WEIGHTS[level], BOUNDS[kind], veto))
    for layout in LAYOUTS:
        gradient, parts = loss_and_gradient(ours, TABLE, samples, layout, weights=aggregation)
        metrics = {name: float(value) for name, value in parts.metrics().items()}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
        assert_trees_close(gradient, expected_gradient)


@jax.jit
def logprobs_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(table), ids[:, None], axis=-1)[:, 0]


def test_no_correction_changes_loss_or_gradient_of_on_policy_samples():
    ids = np.concatenate([s.completion_ids for s in SAMPLES])
    # These logprobs have exactly the bits that the loss computes.
    current = np.split(np.asarray(logprobs_of(jnp.asarray(TABLE), jnp.asarray(ids))), STARTS[1:-1])
    samples = [replace(s, behavior_logprobs=x, policy_logprobs=None) for s, x in zip(SAMPLES, current, strict=True)]
    gradient, parts = loss_and_gradient(PENALIZED, TABLE, samples, SHARED_ROWS, weights=AGGREGATIONS["token-mean"])
    assert np.abs(gradient).max() > 1e-3
    for kind, level in KINDS[1:3]:
        loss = replace(PENALIZED, correction=ratios.ImportanceCorrection(ratios.LOG_WEIGHTS[level], BOUNDS[kind], VETO))
        ours, corrected_parts = loss_and_gradient(loss, TABLE, samples, SHARED_ROWS, weights=AGGREGATIONS["token-mean"])
        # Weights are exactly 1, but the compiler may add up weighted terms in another order.
        np.testing.assert_allclose(ours, gradient, rtol=1e-6, atol=1e-8)
        for name, value in parts.sums.items():
            np.testing.assert_allclose(corrected_parts.sums[name], value, rtol=1e-6, atol=1e-8)
        metrics = corrected_parts.metrics()
        assert float(metrics["policy/correction_max"]) == pytest.approx(1.0, abs=1e-6)
        assert float(metrics["policy/veto_fraction"]) == 0.0
        assert float(metrics["policy/correction_ess"]) == pytest.approx(1.0)
