"""Metrics of advantages, returns and the critic's values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.distributed.collectives import gather_over_hosts
from app.records.moments import Moments, joint_moments, merge_moments
from app.records.sample import Sample


class AdvantageMoments(NamedTuple):
    """Moments over the tokens that the policy wrote, on all hosts."""

    advantages: Moments
    returns: Moments
    errors: Moments
    """Moments of returns - values."""

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> AdvantageMoments:
        """Computes the moments. This is a collective call: every host must make it, even one without samples."""
        local = (
            _token_moments([(s.advantages, s.mask) for s in samples]),
            _token_moments([(s.returns, s.mask) for s in samples]),
            _token_moments([(_value_error(s), s.mask) for s in samples]),
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
        explained = (
            1 - errors.sum_squared_deviations / returns.sum_squared_deviations
            if returns.sum_squared_deviations
            else float("nan")
        )
        metrics["value/explained_variance"] = explained
    return metrics


def _value_error(sample: Sample) -> np.ndarray | None:
    if sample.values is None or sample.returns is None:
        return None
    return sample.returns.astype(np.float64) - sample.token_values


def _token_moments(columns: Sequence[tuple[np.ndarray | None, np.ndarray]]) -> Moments:
    """Computes the moments of the values where the mask is True; skips samples without values."""
    return joint_moments([(values, mask) for values, mask in columns if values is not None])


def moments_over_hosts(parts: Sequence[Moments]) -> list[Moments]:
    """Returns the moments of each quantity over all hosts. All hosts must pass the same quantities."""
    hosts = gather_over_hosts(np.asarray(parts, np.float64))
    return [merge_moments(Moments(*host) for host in quantity.tolist()) for quantity in hosts.swapaxes(0, 1)]
