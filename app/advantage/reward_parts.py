"""GDPO: computes group-relative advantages for each reward function separately, then adds them with weights.

In a sum of rewards, a high-variance function dominates the others, and different answers can get equal advantages.
Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization", equations 4 to 6.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from app.advantage.advantage_metrics import moments_over_hosts
from app.advantage.group import EPSILON, GroupAdvantageFn, spread_over_tokens, zero_variance_fraction
from app.distributed.collectives import gather_table, sum_over_hosts
from app.records.moments import compute_moments
from app.records.sample import Sample


@dataclass(frozen=True)
class RewardParts:
    """The parts of the reward, one per reward function, with separate group-relative advantages."""

    weights: Mapping[str, float]
    """Maps the name of each part in `Sample.rewards` to its weight."""
    advantages: GroupAdvantageFn

    def advantages_of(self, samples: Sequence[Sample]) -> Float[np.ndarray, "parts N"]:
        """Computes weight * group-relative advantage of each part, among the samples that have a value for the part.

        The result is 0 for samples on which the part's reward function abstained.
        """
        group_ids = np.asarray([s.group_id for s in samples])
        parts = np.zeros((len(self.weights), len(samples)))
        for part, (name, weight) in zip(parts, self.weights.items(), strict=True):
            values = values_of(samples, name)
            known = ~np.isnan(values)
            part[known] = weight * self.advantages(values[known], group_ids[known])
        return parts

    def assign(self, samples: Sequence[Sample]) -> list[Sample]:
        """Returns the samples with advantages A_i / (std(A) + 1e-6), where A_i sums `advantages_of` over the parts.

        The standard deviation (ddof = 1) is over the samples with a token in the loss, on all hosts. Nothing is
        subtracted: the mean of A is 0 in every group. All hosts must call it together.
        """
        summed = self.advantages_of(samples).sum(axis=0)
        in_loss = np.asarray([s.mask.any() for s in samples], bool)
        (moments,) = moments_over_hosts([compute_moments(summed, in_loss)])
        return spread_over_tokens(samples, summed / (moments.variance**0.5 + EPSILON))

    def metrics(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Returns each part's fraction of groups with equal values, and its share of sum |weight * advantage|.

        The sum is over the samples in the loss. Both metrics are NaN without data. All hosts must call it together.
        """
        columns = {name: values_of(samples, name).tolist() for name in self.weights}
        table = gather_table({**columns, "": [s.group_id for s in samples]})
        in_loss = [s.mask.any() for s in samples]
        sizes = sum_over_hosts(np.abs(self.advantages_of(samples)) @ np.asarray(in_loss, np.float64)).tolist()
        metrics = {}
        for name, size in zip(self.weights, sizes, strict=True):
            known = ~np.isnan(table[name])
            zero = zero_variance_fraction(table[name][known], table[""][known])
            metrics[f"reward/{name}/zero_variance_fraction"] = zero
            metrics[f"advantage/{name}/share"] = size / sum(sizes) if any(sizes) else float("nan")
        return metrics


def values_of(samples: Sequence[Sample], name: str) -> Float[np.ndarray, "N"]:
    """Returns the value that a reward function gave to each sample; NaN where it abstained."""
    return np.asarray([(s.rewards or {}).get(name, np.nan) for s in samples], np.float64)
