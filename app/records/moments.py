"""Mean, variance and whitening of masked values, which may be empty or distributed over several hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32

EPSILON = 1e-8
"""Added to a variance before dividing by its square root. Source: TRL's and verl's `masked_whiten`."""


class Moments(NamedTuple):
    """The count, mean and sum of squared deviations of a set of numbers; all 0 for no numbers."""

    count: float
    mean: float
    sum_squared_deviations: float
    """The sum of the squared distances from the mean."""

    @property
    def variance(self) -> float:
        """The unbiased variance (ddof = 1); 0 for fewer than two numbers."""
        return self.sum_squared_deviations / max(self.count - 1, 1)

    @property
    def population_std(self) -> float:
        """The standard deviation (ddof = 0); 0 for no numbers."""
        return (self.sum_squared_deviations / max(self.count, 1)) ** 0.5


EMPTY_MOMENTS = Moments(0.0, 0.0, 0.0)


def compute_moments(values: Float[np.ndarray, "*any"], mask: Bool[np.ndarray, "*any"]) -> Moments:
    """Returns the moments of the values where the mask is True, in float64; equal numbers have a variance of 0."""
    kept = np.ravel(values) if mask.all() else values[mask]
    kept = kept.astype(np.float64)
    if not len(kept):
        return EMPTY_MOMENTS
    # Two passes, because with a large mean, mean(x^2) - mean(x)^2 is only rounding error.
    mean = kept.sum() / len(kept)
    kept -= mean
    np.square(kept, out=kept)
    return Moments(float(len(kept)), float(mean), float(kept.sum()))


def joint_moments(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Moments:
    """Returns the moments of the values in all (values, mask) pairs together."""
    if not parts:
        return EMPTY_MOMENTS
    values, masks = zip(*parts, strict=True)
    return compute_moments(np.concatenate(values), np.concatenate(masks))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Returns the moments of the union of disjoint sets, given the moments of each.

    Source: Chan, Golub & LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
    """
    total = EMPTY_MOMENTS
    for part in parts:
        count = total.count + part.count
        if not part.count:
            continue
        difference = part.mean - total.mean
        total = Moments(
            count,
            total.mean + difference * part.count / count,
            total.sum_squared_deviations
            + part.sum_squared_deviations
            + difference**2 * total.count * part.count / count,
        )
    return total


def whiten(
    values: Float[np.ndarray, "*any"], mask: Bool[np.ndarray, "*any"], statistics: Moments
) -> Float32[np.ndarray, "*any"]:
    """Returns (x - mean) / sqrt(variance + 1e-8) where the mask is True, and 0 elsewhere.

    Args:
        statistics: the moments of all values that are whitened together. A single value becomes 0.

    Source: TRL's and verl's `masked_whiten`; the variance has ddof = 1.
    """
    white = (np.asarray(values, np.float64) - statistics.mean) / np.sqrt(statistics.variance + EPSILON)
    return np.where(mask, white, 0).astype(np.float32)
