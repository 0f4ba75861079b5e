"""Group-relative advantages: a sample is as good as its reward stands out among its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Float, Int

from app.flow import Sample

EPSILON = 1e-6


def group_moments(
    rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]
) -> tuple[Float[np.ndarray, "N"], Float[np.ndarray, "N"]]:
    """Mean and standard deviation (ddof = 1) of each sample's own group. The deviation of a group of one is 0."""
    _, first, member_of, sizes = np.unique(group_ids, return_index=True, return_inverse=True, return_counts=True)
    # Measured from one of the group's own rewards, so that equal ones deviate by exactly 0: Adam would turn
    # the rounding error of a plain mean into a step.
    origins = rewards[first]
    means = origins + np.bincount(member_of, rewards - origins[member_of]) / sizes
    squares = np.bincount(member_of, (rewards - means[member_of]) ** 2)
    deviations = np.sqrt(squares / np.maximum(sizes - 1, 1))
    return means[member_of], deviations[member_of]


def grpo_advantages(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """A_i = (r_i - mean(group)) / (std(group) + 1e-6), std with ddof = 1.

    Groups may differ in size. A group of one has nothing to compare with: its advantage is 0, and so
    is that of every member of a group whose rewards are all equal.

    Source: Shao et al. 2024, DeepSeekMath, section 4.1.2.
    """
    means, deviations = group_moments(rewards.astype(np.float64), group_ids)
    return (rewards - means) / (deviations + EPSILON)


def zero_variance_fraction(rewards: Float[np.ndarray, "N"], group_ids: Int[np.ndarray, "N"]) -> float:
    """Share of groups that carry no gradient because all their rewards are equal."""
    spans = {int(g): np.ptp(rewards[group_ids == g]) for g in np.unique(group_ids)}
    return float(np.mean([span == 0 for span in spans.values()])) if spans else 0.0


def credit_by_group(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with their advantage on every token that the policy wrote, 0 elsewhere."""
    rewards = np.asarray([s.reward for s in samples], np.float64)
    group_ids = np.asarray([s.group_id for s in samples])
    advantages = grpo_advantages(rewards, group_ids)
    return [
        replace(s, advantages=np.where(s.mask, np.float32(a), np.float32(0)))
        for s, a in zip(samples, advantages, strict=True)
    ]
