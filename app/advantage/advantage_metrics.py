"""Metrics of advantages, returns and the critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.distributed.collectives import gather_over_hosts
from app.records.moments import Moments, joint_moments, merge_moments
from app.records.sample import Sample


class AdvantageMoments(NamedTuple):
    """Moments of advantages, returns and the critic's errors over all hosts' tokens that the policy wrote."""

    advantages: Moments
    returns: Moments
    errors: Moments
    """Moments of the errors, returns - values."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> AdvantageMoments:
        """Computes the moments over all hosts' samples. All hosts must call it together, even hosts without samples."""
        errors = [
            (s.returns.astype(np.float64) - s.token_values, s.mask)
            for s in samples
            if s.values is not None and s.returns is not None
        ]
        local = (
            joint_moments([(s.advantages, s.mask) for s in samples if s.advantages is not None]),
            joint_moments([(s.returns, s.mask) for s in samples if s.returns is not None]),
            joint_moments(errors),
        )
        return cls(*moments_over_hosts(local))


def advantage_metrics(moments: AdvantageMoments) -> dict[str, float]:
    """Returns the metrics of advantages and returns, and the explained variance of the values.

    The advantages are measured before whitening. Statistics are population statistics (ddof = 0). Explained variance is
    1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for a constant one, NaN if all returns are
    equal.
    """
    advantages, returns, errors = moments
    metrics = {"advantage/mean": advantages.mean, "advantage/std": advantages.population_std}
    if returns.count:
        metrics |= {"returns/mean": returns.mean, "returns/std": returns.population_std}
    if errors.count:
        total = returns.sum_squared_deviations
        metrics["value/explained_variance"] = 1 - errors.sum_squared_deviations / total if total else float("nan")
    return metrics


def moments_over_hosts(parts: Sequence[Moments]) -> list[Moments]:
    """Merges the hosts' moments of each quantity. All hosts must pass the same quantities, in the same order."""
    hosts = gather_over_hosts(np.asarray(parts, np.float64))
    return [merge_moments(Moments(*host) for host in quantity.tolist()) for quantity in hosts.swapaxes(0, 1)]
