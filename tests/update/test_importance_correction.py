"""Tests of the importance correction against hand-computed and float64 values, packed and on-policy."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.token_batch import pack_per_token
from app.records.sample import Sample
from app.update.kl import k3
from app.update.loss_aggregation import StepTotals, aggregations
from app.update.policy_loss import (
    LossStats,
    PolicyLoss,
    cispo_surrogate,
    clipped_surrogate,
    dual_clipped_surrogate,
)
from app.update.ratios import (
    LOG_RATIOS,
    LOG_WEIGHTS,
    BoundFn,
    ImportanceCorrection,
    mask_weights,
    token_log_weight,
    truncate_weights,
)
from app.update.updater import pack_sample_reducer
from tests.tiny import PLAIN_LOSS, assert_trees_close, make_sample, plan_of
from tests.update.table_policy import loss_and_gradient
from tests.update.test_policy_loss import LAYOUTS, LONGEST, SAMPLES, STARTS, TABLE, WHOLE

MIN, MAX, VETO = 0.7, 1.4, 0.4
BOUNDS: dict[str, BoundFn] = {
    "truncate": partial(truncate_weights, max_weight=MAX),
    "mask": partial(mask_weights, min_weight=MIN, max_weight=MAX),
}
KINDS = list(itertools.product(BOUNDS, LOG_WEIGHTS))
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
SURROGATES = {
    "ppo": replace(PLAIN_LOSS, surrogate=partial(clipped_surrogate, **CLIPS)),
    "dual": replace(PLAIN_LOSS, surrogate=partial(dual_clipped_surrogate, dual_clip=1.5, **CLIPS)),
    "cispo": replace(PLAIN_LOSS, surrogate=partial(cispo_surrogate, clip_low=10.0, clip_high=0.2)),
    "gspo": replace(PLAIN_LOSS, surrogate=partial(clipped_surrogate, **CLIPS), log_ratio=LOG_RATIOS["sequence"]),
}
AGGREGATIONS = aggregations(max_new_tokens=LONGEST)


@jax.jit
def logprobs_of(table: jax.Array, ids: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(table), ids[:, None], axis=-1)[:, 0]


def current_logprobs() -> list[np.ndarray]:
    """Returns the logprobs of each sample's tokens under the table, with the bits of the loss."""
    ids = np.concatenate([s.completion_ids for s in SAMPLES])
    return np.split(np.asarray(logprobs_of(jnp.asarray(TABLE), jnp.asarray(ids))), STARTS[1:-1])


def stale(scale: float = 0.5) -> list[Sample]:
    """Returns samples of a policy that differs from the scored one about as much as that differs from the table."""
    rng = np.random.default_rng(7)

    def drawn(sample: Sample, current: np.ndarray) -> Sample:
        scored = current + rng.normal(0, 0.2, len(current))
        behavior = scored + rng.normal(0, scale, len(current))
        return replace(
            sample,
            policy_logprobs=scored.astype(np.float32),
            behavior_logprobs=behavior.astype(np.float32),
        )

    return [drawn(s, current) for s, current in zip(SAMPLES, current_logprobs(), strict=True)]


@dataclass(frozen=True)
class Oracle:
    """Float64 results of every sample."""

    weights: list[np.ndarray]
    unbounded: list[np.ndarray]
    cut: list[np.ndarray]
    vetoed: list[np.ndarray]

    @classmethod
    def of(cls, samples: Sequence[Sample], kind: str, level: str, veto: float) -> Oracle:
        columns = [_weights(sample, kind, level, veto) for sample in samples]
        return cls(*map(list, zip(*columns, strict=True)))

    def over_tokens(self, samples: Sequence[Sample], name: str) -> np.ndarray:
        return np.concatenate([x[s.mask] for x, s in zip(getattr(self, name), samples, strict=True)])


def _weights(sample: Sample, kind: str, level: str, veto: float):
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
    return np.where(vetoed, 0.0, bounded), w, cut, vetoed


def ppo_term(sample: Sample, current: np.ndarray) -> np.ndarray:
    ratio, advantages = np.exp(current - sample.policy_logprobs), np.asarray(sample.advantages, np.float64)
    return np.maximum(-advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.3))


def sample_of(log_weights: Sequence[float], mask: Sequence[bool] | None = None) -> Sample:
    """Returns a sample with these log weights, drawn by a policy compared with one of logprob 0."""
    values = np.asarray(log_weights, np.float32)
    loss_mask = None if mask is None else np.asarray(mask)
    return make_sample(np.zeros(len(values), np.int32), behavior_logprobs=-values, loss_mask=loss_mask)


def corrected(correction: ImportanceCorrection, samples: Sequence[Sample]):
    """Returns the correction of all samples in one row, in the order of the samples."""
    (micro_batch,) = plan_of([range(len(samples))], rows_per_micro_batch=1, num_tokens=40, num_targets=16).micro_batches
    log_weights = pack_per_token(samples, micro_batch, lambda s: np.where(s.mask, -s.behavior_logprobs, 0.0))
    found = correction(jnp.asarray(log_weights), pack_sample_reducer(samples, micro_batch))
    length = sum(len(s.completion_ids) for s in samples)
    return jax.tree.map(lambda x: np.asarray(x)[0, :length].tolist(), found)


LOG_2 = float(np.log(2.0))
BY_HAND = (
    # w: 2, 1/4, 1 and 4; then 1/2, 1/2. The third token was written by a tool: 8.
    sample_of([LOG_2, -2 * LOG_2, 3 * LOG_2, 0.0, 2 * LOG_2], [True, True, False, True, True]),
    sample_of([-LOG_2, -LOG_2]),
)


@pytest.mark.parametrize(
    ("bound", "level", "expected"),
    [
        ("truncate", "token", [2, 0.25, 1, 1, 3, 0.5, 0.5]),
        ("truncate", "sequence", [2, 2, 2, 2, 2, 0.25, 0.25]),
        ("truncate", "geometric", [2**0.25] * 5 + [0.5, 0.5]),
        ("mask", "token", [2, 0, 1, 1, 0, 0.5, 0.5]),
        ("mask", "sequence", [2, 2, 2, 2, 2, 0, 0]),
        ("mask", "geometric", [2**0.25] * 5 + [0.5, 0.5]),
    ],
)
def test_weights_by_hand(bound: str, level: str, expected: list[float]):
    bounds = {
        "truncate": partial(truncate_weights, max_weight=3.0),
        "mask": partial(mask_weights, min_weight=0.4, max_weight=3.0),
    }
    found = corrected(ImportanceCorrection(LOG_WEIGHTS[level], bounds[bound]), BY_HAND)
    assert found.weights == pytest.approx(expected, rel=1e-6)
    assert not any(found.vetoed)


@pytest.mark.parametrize("level", LOG_WEIGHTS)
def test_one_token_that_the_policy_would_hardly_have_drawn_vetoes_its_sample_and_no_other(level: str):
    found = corrected(ImportanceCorrection(LOG_WEIGHTS[level], BOUNDS["truncate"], veto=0.3), BY_HAND)
    assert found.vetoed == [True] * 5 + [False] * 2
    assert found.weights[:5] == [0.0] * 5 and min(found.weights[5:]) > 0.2
    # What a tool wrote vetoes nothing.
    by_tool = sample_of([0.0, -15.0], [True, False])
    assert not any(corrected(ImportanceCorrection(LOG_WEIGHTS[level], BOUNDS["truncate"], veto=0.3), [by_tool]).vetoed)


@pytest.mark.parametrize(("kind", "level"), KINDS)
def test_no_distance_between_the_policies_overflows(kind: str, level: str):
    far = [sample_of([80.0] * 3), sample_of([-80.0] * 3)]
    found = corrected(ImportanceCorrection(LOG_WEIGHTS[level], BOUNDS[kind]), far)
    assert found.unbounded_weights == pytest.approx([np.exp(20)] * 3 + [np.exp(-20)] * 3, rel=1e-6)
    assert np.isfinite(found.weights).all()


@pytest.mark.parametrize(("kind", "level", "veto"), [*((*kind, VETO) for kind in KINDS), ("truncate", "token", 0.0)])
def test_loss_gradient_and_metrics_equal_float64_however_samples_are_packed(kind: str, level: str, veto: float):
    samples, weights = stale(), list(AGGREGATIONS.values())[KINDS.index((kind, level)) % len(AGGREGATIONS)]
    oracle, totals = Oracle.of(samples, kind, level, veto), StepTotals.from_samples(samples)
    loss = replace(PLAIN_LOSS, correction=ImportanceCorrection(LOG_WEIGHTS[level], BOUNDS[kind], veto))
    expected_loss = sum(
        float(weights(s, totals).astype(np.float64) @ (w * ppo_term(s, current)))
        for s, w, current in zip(samples, oracle.weights, current_logprobs(), strict=True)
    )
    w, unbounded, cut, vetoed = (
        oracle.over_tokens(samples, name) for name in ("weights", "unbounded", "cut", "vetoed")
    )
    expected = {
        "loss": expected_loss,
        "policy/correction_mean": w.mean(),
        "policy/correction_max": unbounded.max(),
        "policy/correction_cut_fraction": cut.mean(),
        "policy/veto_fraction": vetoed.mean(),
        "policy/correction_ess": w.sum() ** 2 / (len(w) * (w**2).sum()),
    }
    assert 0 < cut.mean() < 1 and 0 < expected["policy/correction_ess"] < 1
    assert (0 < vetoed.mean() < 1) == (veto > 0)
    gradients = []
    for layout in (WHOLE, *LAYOUTS[1:]):
        gradient, parts = loss_and_gradient(loss, TABLE, samples, layout, weights=weights)
        metrics = {name: float(value) for name, value in parts.metrics().items()}
        assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)
        gradients.append(gradient)
    for gradient in gradients[1:]:
        assert_trees_close(gradient, gradients[0])


def test_penalty_and_bonus_of_a_vetoed_sample_stay():
    kept = replace(PLAIN_LOSS, kl_estimator=k3, beta=0.3, entropy_coef=0.2)
    vetoing = replace(kept, correction=ImportanceCorrection(token_log_weight, BOUNDS["truncate"], veto=0.999))
    # Every sample has such a token.
    samples = [replace(s, behavior_logprobs=np.asarray(s.policy_logprobs) + np.float32(1)) for s in stale()]
    without = [replace(s, advantages=np.zeros(len(s.completion_ids), np.float32)) for s in samples]
    for weights in AGGREGATIONS.values():
        ours, parts = loss_and_gradient(vetoing, TABLE, samples, WHOLE, weights=weights)
        expected, of_penalty = loss_and_gradient(kept, TABLE, without, WHOLE, weights=weights)
        assert float(parts.sums["policy/veto_fraction"]) == pytest.approx(1.0)
        assert float(parts.metrics()["policy/correction_ess"]) == 0.0
        assert float(parts.sums["loss"]) == float(of_penalty.sums["loss"])
        assert_trees_close(ours, expected)


@pytest.mark.parametrize(("surrogate", "several"), [("ppo", True), ("dual", False), ("cispo", True), ("gspo", False)])
def test_on_policy_every_correction_leaves_loss_and_gradient_as_they_are(surrogate: str, several: bool):
    samples = on_policy(several)
    plain = SURROGATES[surrogate]
    for aggregation in ["constant-length", "token-mean"] if several else ["token-mean"]:
        gradient, parts = of_packed_rows(plain, samples, aggregation)
        assert np.abs(gradient).max() > 1e-3
        for kind, level in KINDS:
            loss = replace(plain, correction=ImportanceCorrection(LOG_WEIGHTS[level], BOUNDS[kind], VETO))
            corrected_gradient, corrected_parts = of_packed_rows(loss, samples, aggregation)
            # Weights are exactly 1; what is multiplied by them, compilers may add up in another order.
            np.testing.assert_allclose(corrected_gradient, gradient, rtol=1e-6, atol=1e-8)
            for name, value in parts.sums.items():
                np.testing.assert_allclose(corrected_parts.sums[name], value, rtol=1e-6, atol=1e-8)
            metrics = corrected_parts.metrics()
            assert float(metrics["policy/correction_max"]) == pytest.approx(1.0, abs=1e-6)
            assert float(metrics["policy/veto_fraction"]) == 0.0
            assert float(metrics["policy/correction_ess"]) == pytest.approx(1.0)


def on_policy(several: bool) -> list[Sample]:
    """Returns samples of the policy before the step's updates, which is the table itself if there is only one."""
    if several:
        return [replace(s, behavior_logprobs=np.asarray(s.policy_logprobs)) for s in stale()]
    return [
        replace(s, behavior_logprobs=x, policy_logprobs=None) for s, x in zip(SAMPLES, current_logprobs(), strict=True)
    ]


def of_packed_rows(loss: PolicyLoss, samples: Sequence[Sample], aggregation: str) -> tuple[np.ndarray, LossStats]:
    gradient, parts = loss_and_gradient(loss, TABLE, samples, LAYOUTS[1], weights=AGGREGATIONS[aggregation])
    return np.asarray(gradient), parts
