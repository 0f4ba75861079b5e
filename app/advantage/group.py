"""Group-relative advantages: each reward is compared with the rewards of the other samples of the same prompt.

Groups are given by id and may differ in size, as samples can be dropped. The advantage is exactly 0 in a group of one
sample and in a group whose rewards are all equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from app.advantage.token_rewards import TokenKLFn, token_kl
from app.records.sample import Sample

EPSILON = 1e-6

GroupAdvantageFn = Callable[[Float[np.ndarray, "N"], Int[np.ndarray, "N"]], Float[np.ndarray, "N"]]
"""Returns one advantage per sample, given rewards and group ids."""
GroupRewardFn = Callable[[Sequence[Sample]], Float[np.ndarray, "N"]]
"""Returns the rewards of samples, which are then compared within groups."""


class GroupMoments(NamedTuple):
    """Size, mean and standard deviation of each sample's group, one entry per sample."""

    sizes: Int[np.ndarray, "N"]
    means: Float[np.ndarray, "N"]
    stds: Float[np.ndarray, "N"]
    """Standard deviation (ddof = 1); 0 in a group of one."""


def group_moments(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> GroupMoments:
    """Computes size, mean and standard deviation of each sample's group."""
    _, first, member_of, sizes = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
    # Subtract one reward of the group first, so that equal rewards deviate by exactly 0: Adam would turn the rounding
    # error of a plain mean into a step.
    origins = rewards[first]
    means = origins + np.bincount(member_of, rewards - origins[member_of]) / sizes
    squares = np.bincount(member_of, (rewards - means[member_of]) ** 2)
    deviations = np.sqrt(squares / np.maximum(sizes - 1, 1))
    return GroupMoments(sizes[member_of], means[member_of], deviations[member_of])


def grpo_advantages(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Computes A_i = (r_i - mean(group)) / (std(group) + 1e-6), where std has ddof = 1.

    Source: Shao et al. 2024, DeepSeekMath, section 4.1.2.
    """
    group = group_moments(rewards.astype(np.float64), group_ids)
    return (rewards - group.means) / (group.stds + EPSILON)


def dr_grpo_advantages(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Computes A_i = r_i - mean(group). Without division by std, very easy and very hard prompts get no extra weight.

    Source: Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2.
    """
    return rewards - group_moments(rewards.astype(np.float64), group_ids).means


def rloo_advantages(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Computes A_i = r_i - mean(other rewards of the group) = n / (n - 1) * (r_i - mean(group)) for a group of n.

    The baseline does not depend on the sample itself, so the gradient is unbiased.

    Sources: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; Ahmadian et al. 2024, "Back to
    Basics", section 2.
    """
    group = group_moments(rewards.astype(np.float64), group_ids)
    return group.sizes / np.maximum(group.sizes - 1, 1) * (rewards - group.means)


def maxrl_advantages(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """Computes A_i = (r_i - mean(group)) / mean(group) for non-negative rewards; 0 in a group whose rewards are all 0.

    With rewards 0 and 1 and success probability p, the expected gradient of a group of n samples is the gradient of
    log p = -sum_k (1 - p)^k / k, truncated after n - 1 terms; `rloo_advantages` has only the first term.

    Source: Tajwar et al. 2026, "Maximum Likelihood Reinforcement Learning", algorithm 1.
    """
    means = group_moments(rewards.astype(np.float64), group_ids).means
    return np.divide(rewards - means, means, out=np.zeros(len(rewards)), where=means > 0)


GROUP_ADVANTAGES: Mapping[str, GroupAdvantageFn] = MappingProxyType(
    {"grpo": grpo_advantages, "dr_grpo": dr_grpo_advantages, "rloo": rloo_advantages, "maxrl": maxrl_advantages}
)


def zero_variance_fraction(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> float:
    """Returns the fraction of groups whose rewards are all equal, among groups of several samples, or NaN without any.

    These groups contribute nothing to the gradient of an estimator that compares the samples of a group.
    """
    groups = [rewards[group_ids == g] for g in np.unique(group_ids)]
    spans = [np.ptp(group) for group in groups if len(group) > 1]
    return float(np.mean(np.equal(spans, 0))) if spans else np.nan


def task_rewards(samples: Sequence[Sample]) -> Float[np.ndarray, "N"]:
    """Returns the rewards of the samples, without a KL penalty."""
    return np.asarray([s.reward for s in samples], np.float64)


def kl_penalized_rewards(samples: Sequence[Sample], *, kl_estimator: TokenKLFn, beta: float) -> Float[np.ndarray, "N"]:
    """Computes r_i - beta * sum_t KL_t(policy || reference), over the tokens that the policy wrote.

    Both logprobs come from the same scoring program, never from the sampler: for equal policies the penalty is
    exactly 0, so group statistics cannot magnify rounding differences.

    Source: Ahmadian et al. 2024, section 2 (with k1).
    """
    kls = [float(token_kl(s, kl_estimator)[s.mask].sum()) for s in samples]
    return task_rewards(samples) - beta * np.asarray(kls, np.float64)


def assign_group_advantages(
    samples: Sequence[Sample], *, advantages: GroupAdvantageFn, rewards: GroupRewardFn = task_rewards
) -> list[Sample]:
    """Returns the samples with their group-relative advantage on every token that the policy wrote."""
    return spread_over_tokens(samples, advantages(rewards(samples), np.asarray([s.group_id for s in samples])))


def spread_over_tokens(samples: Sequence[Sample], by_sample: Float[np.ndarray, "N"]) -> list[Sample]:
    """Returns the samples with their advantage on every token that the policy wrote, 0 elsewhere."""
    return [
        replace(s, advantages=np.where(s.mask, np.float32(a), np.float32(0)))
        for s, a in zip(samples, by_sample, strict=True)
    ]
