"""Tests loss, gradient and metrics of every surrogate, ratio, penalty and bonus with a table of logits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import numpy as np
import pytest

from app.advantage.group import GROUP_ADVANTAGES, assign_group_advantages, kl_penalized_rewards, task_rewards
from app.records.sample import Sample
from app.tracking.sample_metrics import mismatch_metrics
from app.update import ratios
from app.update.kl import KL_ESTIMATORS
from app.update.loss_aggregation import StepTotals, sequence_mean_token_mean, token_mean
from app.update.policy_loss import PolicyLoss, cispo_surrogate, clipped_surrogate, dual_clipped_surrogate
from tests.tiny import PLAIN_LOSS, assert_trees_close
from tests.update.table_policy import (
    AGGREGATIONS,
    CURRENT,
    ENTROPIES,
    LAYOUTS,
    SAMPLES,
    SHARED_ROWS,
    TABLE,
    loss_and_gradient,
    oracle,
    over_tokens,
)

CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
DUAL_CLIP, BETA, ENTROPY_COEF = 1.5, 0.3, 0.2
SURROGATES = {
    "clip": partial(clipped_surrogate, **CLIPS),
    "dual": partial(dual_clipped_surrogate, dual_clip=DUAL_CLIP, **CLIPS),
}


@dataclass(frozen=True)
class Combination:
    surrogate: str
    estimator: str | None
    place: str
    entropy_coef: float

    @property
    def loss(self) -> PolicyLoss:
        return replace(
            PLAIN_LOSS,
            surrogate=SURROGATES[self.surrogate],
            kl_estimator=KL_ESTIMATORS[self.estimator] if self.estimator else None,
            beta=BETA if self.place == "loss" else 0.0,
            entropy_coef=self.entropy_coef,
        )

    def with_advantages(self, name: str) -> list[Sample]:
        rewards = task_rewards
        if self.estimator and self.place == "reward":
            rewards = partial(kl_penalized_rewards, kl_estimator=KL_ESTIMATORS[self.estimator], beta=BETA)
        return assign_group_advantages(SAMPLES, advantages=GROUP_ADVANTAGES[name], rewards=rewards)

    def kl(self, sample: Sample, current: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns KL estimates and their derivatives in float64."""
        d = current - sample.reference_logprobs
        estimates = {"k1": (d, 1 + 0 * d), "k2": (d**2 / 2, d), "k3": (np.exp(-d) - 1 + d, 1 - np.exp(-d))}
        return estimates[self.estimator or "k1"]

    def term(self, sample: Sample, current: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ratio, advantages = np.exp(current - sample.policy_logprobs), np.asarray(sample.advantages, np.float64)
        plain, clipped = -advantages * ratio, -advantages * np.clip(ratio, 0.8, 1.3)
        losses, slopes = np.maximum(plain, clipped), np.where(plain >= clipped, plain, 0.0)
        if self.surrogate == "dual":
            beyond = (advantages < 0) & (ratio > DUAL_CLIP)
            losses, slopes = np.where(beyond, -advantages * DUAL_CLIP, losses), np.where(beyond, 0.0, slopes)
        if self.estimator and self.place == "loss":
            estimates, slopes_of_kl = self.kl(sample, current)
            losses, slopes = losses + BETA * estimates, slopes + BETA * slopes_of_kl
        return losses, slopes

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns the metrics over the tokens that the policy generated, in float64."""
        current, policy, behavior, advantages = (
            over_tokens(samples, columns)
            for columns in (CURRENT, *([getattr(s, name) for s in samples] for name in PER_TOKEN))
        )
        ratio, d = np.exp(current - policy), current - behavior
        is_beyond = (advantages < 0) & (ratio > DUAL_CLIP)
        found = {
            "policy/entropy": over_tokens(samples, ENTROPIES).mean(),
            "policy/clip_fraction_low": ((ratio < 0.8) & (advantages < 0)).mean(),
            "policy/clip_fraction_high": ((ratio > 1.3) & (advantages > 0)).mean(),
            "policy/clip_fraction_dual": is_beyond.mean() if self.surrogate == "dual" else 0.0,
            "policy/ratio_max": ratio.max(),
            "rollout/sampler_scorer_kl": (np.exp(d) - 1 - d).mean(),
            "rollout/sampler_scorer_logprob_diff_mean": np.abs(d).mean(),
            "rollout/sampler_scorer_logprob_diff_max": np.abs(d).max(),
        }
        assert found["policy/clip_fraction_low"] > 0 and found["policy/clip_fraction_high"] > 0 and is_beyond.any()
        if self.estimator:
            kl = [self.kl(s, current)[0] for s, current in zip(samples, CURRENT, strict=True)]
            found["policy/kl"] = over_tokens(samples, kl).mean()
        return found


PER_TOKEN = ("policy_logprobs", "behavior_logprobs", "advantages")
COMBINATIONS = [
    Combination("dual", None, "loss", ENTROPY_COEF),
    Combination("clip", "k1", "reward", ENTROPY_COEF),
    Combination("clip", "k1", "loss", 0.0),
    Combination("dual", "k2", "loss", 0.0),
    Combination("clip", "k3", "loss", ENTROPY_COEF),
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_policy_loss_gradient_and_metrics_equal_float64_for_any_packing(combination: Combination):
    # Aggregations and advantages do not change the code path, so every case uses only two pairs of them, in turn.
    # maxrl is excluded: its advantages are zero if the mean reward of a group is not positive, as in some groups here.
    first, advantages = COMBINATIONS.index(combination), [name for name in GROUP_ADVANTAGES if name != "maxrl"]
    for i in (first, first + 1):
        weights = list(AGGREGATIONS.values())[i % len(AGGREGATIONS)]
        samples = combination.with_advantages(advantages[i % len(advantages)])
        loss, expected = oracle(samples, weights, combination.term, entropy_coef=combination.entropy_coef)
        metrics = {"loss": loss, **combination.metrics(samples)}
        assert np.abs(expected).max() > 1e-3
        for layout in LAYOUTS:
            gradient, parts = loss_and_gradient(combination.loss, TABLE, samples, layout, weights=weights)
            found = {name: float(value) for name, value in parts.metrics().items()}
            assert found == pytest.approx(metrics, rel=1e-5, abs=1e-6)
            assert_trees_close(gradient, expected)


EVERYTHING = replace(
    Combination("dual", "k3", "loss", ENTROPY_COEF).loss,
    log_ratio=ratios.sequence_log_ratio,
    correction=ratios.ImportanceCorrection(
        ratios.geometric_log_weight, partial(ratios.truncate_weights, max_weight=1.4), veto=0.1
    ),
)


def test_a_step_without_tokens_in_the_loss_has_zero_loss_and_gradient():
    empty = [replace(s, loss_mask=np.zeros(len(s.completion_ids), bool)) for s in SAMPLES]
    assert StepTotals.from_samples(empty) == (0, 0)
    for weights in AGGREGATIONS.values():
        gradient, parts = loss_and_gradient(EVERYTHING, TABLE, empty, SHARED_ROWS, weights=weights)
        assert not gradient.any()
        assert all(float(x) == 0.0 for x in jax.tree.leaves(parts))


LOW, HIGH = 3e-4, 4e-4
GSPO = replace(
    PLAIN_LOSS, surrogate=partial(clipped_surrogate, clip_low=LOW, clip_high=HIGH), log_ratio=ratios.sequence_log_ratio
)
CISPO_LOW, CISPO_HIGH = 10.0, 0.2
CISPO = replace(PLAIN_LOSS, surrogate=partial(cispo_surrogate, clip_low=CISPO_LOW, clip_high=CISPO_HIGH))


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
    ids=["gspo", "gspo with token-mean", "cispo"],
)
def test_gspo_and_cispo_loss_and_gradient_equal_their_papers_for_any_packing(loss, term, weights, scale):
    # The samples are scored by a policy near the table, so that some ratios are clipped.
    rng = np.random.default_rng(3)
    samples = [
        replace(s, policy_logprobs=(current + rng.normal(0, scale, len(current))).astype(np.float32))
        for s, current in zip(SAMPLES, CURRENT, strict=True)
    ]
    expected_loss, expected = oracle(samples, weights, term)
    for layout in LAYOUTS:
        gradient, parts = loss_and_gradient(loss, TABLE, samples, layout, weights=weights)
        assert float(parts.sums["loss"]) == pytest.approx(expected_loss, rel=1e-5, abs=1e-6)
        assert_trees_close(gradient, expected)
        clipped = float(parts.sums["policy/clip_fraction_high"]) + float(parts.sums["policy/clip_fraction_low"])
        assert 0.05 < clipped < 0.95


@pytest.mark.parametrize("loss", [GSPO, CISPO], ids=["gspo", "cispo"])
@pytest.mark.parametrize("level", ratios.LOG_RATIOS)
def test_on_policy_ratios_are_exactly_one_and_the_gradient_equals_reinforce(loss: PolicyLoss, level: str):
    loss = replace(loss, log_ratio=ratios.LOG_RATIOS[level])
    unscored = [replace(sample, policy_logprobs=None) for sample in SAMPLES]
    gradient, parts = loss_and_gradient(loss, TABLE, unscored, SHARED_ROWS, weights=token_mean)
    assert float(parts.maxima["policy/ratio_max"]) == 1.0
    scored = [replace(sample, policy_logprobs=x.astype(np.float32)) for sample, x in zip(SAMPLES, CURRENT, strict=True)]
    mismatch = mismatch_metrics(scored)
    assert len(mismatch) == 5 and {name: parts.sums[name] for name in mismatch} == pytest.approx(mismatch, rel=1e-5)
    _, expected = oracle(SAMPLES, token_mean, lambda sample, current: (current, -np.asarray(sample.advantages)))
    assert_trees_close(gradient, expected)
