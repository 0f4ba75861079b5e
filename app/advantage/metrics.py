"""Metrics of advantages, returns and the critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.distributed.collectives import (
    moments_over_hosts,
)
from app.records.moments import Moments, joint_moments
from app.records.sample import Sample


class AdvantageMoments(NamedTuple):
    """Over the tokens that the policy wrote, of all hosts."""

    advantages: Moments
    returns: Moments
    errors: Moments
    """Of returns - values."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> AdvantageMoments:
        """Every host asks at once, also one that has no samples left."""
        own = (
            _token_moments([(s.advantages, s.mask) for s in samples]),
            _token_moments([(s.returns, s.mask) for s in samples]),
            _token_moments([(_value_error(s), s.mask) for s in samples]),
        )
        return cls(*moments_over_hosts(own))


def advantage_metrics(moments: AdvantageMoments) -> dict[str, float]:
    """Advantages, returns and what the critic knew of them.

    Of advantages that are not whitened yet: mean 0 and deviation 1 would tell nothing. Population statistics
    (ddof = 0). Explained variance is 1 - Var(returns - values) / Var(returns): 1 of a critic that knows all, 0 of one
    that says the same everywhere, NaN where the returns are all equal.
    """
    advantages, returns, errors = moments
    metrics = {"advantage/mean": advantages.mean, "advantage/std": advantages.population_std}
    if returns.count:
        metrics |= {"returns/mean": returns.mean, "returns/std": returns.population_std}
    if errors.count:
        known = (
            1 - errors.sum_squared_deviations / returns.sum_squared_deviations
            if returns.sum_squared_deviations
            else float("nan")
        )
        metrics["value/explained_variance"] = known
    return metrics


def _value_error(sample: Sample) -> np.ndarray | None:
    if sample.values is None or sample.returns is None:
        return None
    return sample.returns.astype(np.float64) - sample.token_values


def _token_moments(columns: Sequence[tuple[np.ndarray | None, np.ndarray]]) -> Moments:
    """Of the values under their masks, of the samples that have values."""
    return joint_moments([(values, mask) for values, mask in columns if values is not None])
