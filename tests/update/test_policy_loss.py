"""Tests of combinations of surrogate, penalty, bonus, aggregation and advantages, on a table of logits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.advantage.group import GROUP_ADVANTAGES, assign_group_advantages, kl_penalized_rewards, task_rewards
from app.batching.micro_batch_plan import MicroBatchPlan
from app.records.sample import Sample
from app.update.kl import KL_ESTIMATORS
from app.update.loss_aggregation import AggregationFn, StepTotals, aggregations
from app.update.policy_loss import PolicyLoss, clipped_surrogate, dual_clipped_surrogate
from tests.tiny import PLAIN_LOSS, assert_trees_close, one_a_row, packed_plan, plan_of, random_samples
from tests.update.table_policy import loss_and_gradient

VOCAB, LONGEST = 5, 9
CLIPS = {"clip_low": 0.2, "clip_high": 0.3}
DUAL_CLIP, BETA, ENTROPY_COEF = 1.5, 0.3, 0.2
SURROGATES = {
    "clip": partial(clipped_surrogate, **CLIPS),
    "dual": partial(dual_clipped_surrogate, dual_clip=DUAL_CLIP, **CLIPS),
}
AGGREGATIONS = aggregations(max_new_tokens=LONGEST)
RNG = np.random.default_rng(0)
# The last group has lost all of its members but one, and one sample has no token to learn from.
SAMPLES = random_samples(4, 3, vocab_size=VOCAB, longest_completion=LONGEST, with_holes=True)[:-2]
SAMPLES[4] = replace(SAMPLES[4], loss_mask=np.zeros(len(SAMPLES[4].completion_ids), bool))
STARTS = np.cumsum([0, *(len(s.completion_ids) for s in SAMPLES)])
TABLE = RNG.normal(0, 1.5, (STARTS[-1], VOCAB)).astype(np.float32)
WHOLE = one_a_row(len(SAMPLES), rows_per_micro_batch=len(SAMPLES), num_tokens=16, num_targets=9)
LAYOUTS = (
    one_a_row(len(SAMPLES), rows_per_micro_batch=3, num_tokens=24, num_targets=12),
    plan_of(((5, 0, 3), (1, 7), (), (9, 2, 6, 4, 8)), rows_per_micro_batch=2, num_tokens=80, num_targets=45),
    packed_plan(SAMPLES, quota=160, row_length=80, share_prompts=True),
)


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
            beta=BETA if self.estimator and self.place == "loss" else 0.0,
            entropy_coef=self.entropy_coef,
        )

    def with_advantages(self, name: str) -> list[Sample]:
        rewards = task_rewards
        if self.estimator and self.place == "reward":
            rewards = partial(kl_penalized_rewards, kl_estimator=KL_ESTIMATORS[self.estimator], beta=BETA)
        return assign_group_advantages(SAMPLES, advantages=GROUP_ADVANTAGES[name], rewards=rewards)


PENALTIES = [(None, "loss"), *itertools.product(KL_ESTIMATORS, ("loss", "reward"))]
COMBINATIONS = [
    Combination(surrogate, estimator, place, entropy_coef)
    for (surrogate, entropy_coef), (estimator, place) in itertools.product(
        [("clip", 0.0), ("dual", ENTROPY_COEF)], PENALTIES
    )
]


@pytest.mark.parametrize("combination", COMBINATIONS, ids=str)
def test_micro_batches_padding_and_packing_change_neither_loss_nor_gradient_nor_metrics(combination: Combination):
    # Aggregations and advantages only change numbers: two aggregations with one kind of advantages each, in turn.
    first = COMBINATIONS.index(combination)
    for i in (first, first + 1):
        name, weights = list(AGGREGATIONS.items())[i % len(AGGREGATIONS)]
        samples = combination.with_advantages(list(GROUP_ADVANTAGES)[(i + first // 4) % len(GROUP_ADVANTAGES)])
        expected = gradient, parts = of_layout(combination, samples, WHOLE, weights)
        assert float(jnp.abs(gradient).max()) > 1e-3
        assert float(parts.sums["loss"]) == pytest.approx(oracle(combination, samples, name), rel=1e-5, abs=1e-6)
        for layout in LAYOUTS:
            assert_trees_close(of_layout(combination, samples, layout, weights), expected)


def oracle(combination: Combination, samples: Sequence[Sample], aggregation: str) -> float:
    """Computes the loss in float64, token by token, from the definitions."""
    by_sample = []
    for sample, start in zip(samples, STARTS[:-1], strict=True):
        losses = []
        policy, reference, advantages = map(
            np.asarray, (sample.policy_logprobs, sample.reference_logprobs, sample.advantages)
        )
        for t in np.flatnonzero(sample.mask):
            logits = TABLE[start + t].astype(np.float64)
            probabilities = np.exp(logits) / np.exp(logits).sum()
            current = np.log(probabilities[sample.completion_ids[t]])
            ratio, advantage = np.exp(current - policy[t]), advantages[t]
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.3))
            if combination.surrogate == "dual" and advantage < 0:
                loss = min(loss, -advantage * DUAL_CLIP)
            if combination.estimator and combination.place == "loss":
                d = current - reference[t]
                loss += BETA * {"k1": d, "k2": d**2 / 2, "k3": np.exp(-d) - 1 + d}[combination.estimator]
            losses.append(loss + combination.entropy_coef * (probabilities * np.log(probabilities)).sum())
        if losses:
            by_sample.append(losses)
    return float(
        {
            "token-mean": np.mean(np.concatenate(by_sample)),
            "sequence-mean-token-mean": np.mean([np.mean(losses) for losses in by_sample]),
            "sequence-mean-token-sum": np.mean([np.sum(losses) for losses in by_sample]),
            "constant-length": np.mean([np.sum(losses) / LONGEST for losses in by_sample]),
        }[aggregation]
    )


def of_layout(combination: Combination, samples: Sequence[Sample], layout: MicroBatchPlan, weights: AggregationFn):
    """Returns the gradient, and loss and metrics."""
    return loss_and_gradient(combination.loss, TABLE, samples, layout, weights=weights)


def metrics_of(combination: Combination) -> dict[str, float]:
    _, parts = of_layout(combination, combination.with_advantages("grpo"), WHOLE, AGGREGATIONS["token-mean"])
    return {name: float(value) for name, value in parts.sums.items()}


def test_the_kl_is_reported_alike_whether_loss_or_reward_pays_for_it():
    in_loss, in_reward = (metrics_of(Combination("clip", "k1", place, 0.0)) for place in ("loss", "reward"))
    assert in_loss["policy/kl"] == in_reward["policy/kl"] != 0.0


def test_the_kl_of_the_sampler_is_that_of_its_logprobs_to_the_policys():
    samples = Combination("clip", None, "loss", 0.0).with_advantages("grpo")
    expected = []
    for sample, start in zip(samples, STARTS[:-1], strict=True):
        logits = TABLE[start : start + len(sample.completion_ids)].astype(np.float64)
        logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        current = np.take_along_axis(logprobs, np.asarray(sample.completion_ids)[:, None], axis=1)[:, 0]
        d = (current - np.asarray(sample.behavior_logprobs))[np.asarray(sample.mask)]
        expected += [*(np.exp(d) - 1 - d)]
    found = metrics_of(Combination("clip", None, "loss", 0.0))["rollout/sampler_scorer_kl"]
    assert found == pytest.approx(np.mean(expected), rel=1e-4) and found > 0


def test_the_second_clip_is_counted_where_it_cuts_and_zero_where_it_is_off():
    on, off = (metrics_of(Combination(surrogate, None, "loss", 0.0)) for surrogate in ("dual", "clip"))
    assert on["policy/clip_fraction_dual"] > 0.05
    assert off["policy/clip_fraction_dual"] == 0.0
    assert on.keys() == off.keys()


@pytest.mark.parametrize("combination", COMBINATIONS[::5], ids=str)
def test_samples_without_an_advantage_are_moved_by_penalty_and_bonus_alone(combination: Combination):
    samples = [replace(s, advantages=np.zeros(len(s.completion_ids), np.float32)) for s in SAMPLES]
    gradient, parts = of_layout(combination, samples, WHOLE, AGGREGATIONS["constant-length"])
    moved = combination.loss.beta > 0 or combination.entropy_coef > 0
    assert bool(jnp.any(gradient != 0)) == moved
    assert float(parts.sums["loss"]) == pytest.approx(oracle(combination, samples, "constant-length"), abs=1e-6)


def test_a_step_without_a_single_token_has_neither_loss_nor_gradient():
    empty = [replace(s, loss_mask=np.zeros(len(s.completion_ids), bool)) for s in SAMPLES]
    assert StepTotals.from_samples(empty) == (0, 0)
    for combination in COMBINATIONS[-3:]:
        gradient, parts = of_layout(combination, empty, WHOLE, AGGREGATIONS["sequence-mean-token-sum"])
        assert not gradient.any()
        assert all(float(x) == 0.0 for x in jax.tree.leaves(parts))
