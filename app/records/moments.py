"""Mean, variance and whitening over the tokens of a mask, also where several hosts hold them; defined on none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32

EPSILON = 1e-8
"""Added to a variance that is divided by. Source: TRL's and verl's `masked_whiten`."""


class Moments(NamedTuple):
    """What is kept of a set of numbers; sets are joined by `merged`. All 0 of none."""

    count: float
    mean: float
    sum_squared_deviations: float
    """Sum of the squared distances from the mean."""

    @property
    def variance(self) -> float:
        """Unbiased (ddof = 1); 0 of fewer than two."""
        return self.sum_squared_deviations / max(self.count - 1, 1)

    @property
    def population_std(self) -> float:
        """Of exactly these numbers (ddof = 0)."""
        return (self.sum_squared_deviations / max(self.count, 1)) ** 0.5


EMPTY_MOMENTS = Moments(0.0, 0.0, 0.0)


def compute_moments(values: Float[np.ndarray, "*any"], mask: Bool[np.ndarray, "*any"]) -> Moments:
    """Of the values where the mask is True, in float64. Of equal float32 numbers, `squares` is exactly 0."""
    kept = np.ravel(values) if mask.all() else values[mask]
    kept = kept.astype(np.float64)
    if not len(kept):
        return EMPTY_MOMENTS
    # Not one pass over x and x^2: where the mean is large their difference is all rounding.
    mean = kept.sum() / len(kept)
    kept -= mean
    np.square(kept, out=kept)
    return Moments(float(len(kept)), float(mean), float(kept.sum()))


def joint_moments(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Moments:
    """`moments` of all (values, mask) together."""
    if not parts:
        return EMPTY_MOMENTS
    values, masks = zip(*parts, strict=True)
    return compute_moments(np.concatenate(values), np.concatenate(masks))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint sets.

    Source: Chan, Golub & LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
    """
    total = EMPTY_MOMENTS
    for part in parts:
        count = total.count + part.count
        if not part.count:
            continue
        apart = part.mean - total.mean
        total = Moments(
            count,
            total.mean + apart * part.count / count,
            total.sum_squared_deviations + part.sum_squared_deviations + apart**2 * total.count * part.count / count,
        )
    return total


def whiten(
    values: Float[np.ndarray, "*any"], mask: Bool[np.ndarray, "*any"], statistics: Moments
) -> Float32[np.ndarray, "*any"]:
    """(x - mean) / sqrt(variance + 1e-8) where the mask is True, 0 elsewhere.

    Args:
        over: of all the values that are whitened together. A single one becomes 0.

    Source: TRL's and verl's `masked_whiten`; the variance has ddof = 1.
    """
    white = (np.asarray(values, np.float64) - statistics.mean) / np.sqrt(statistics.variance + EPSILON)
    return np.where(mask, white, 0).astype(np.float32)
