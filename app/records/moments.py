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
    squares: float
    """Sum of the squared distances from the mean."""

    @property
    def variance(self) -> float:
        """Unbiased (ddof = 1); 0 of fewer than two."""
        return self.squares / max(self.count - 1, 1)

    @property
    def population_std(self) -> float:
        """Of exactly these numbers (ddof = 0)."""
        return (self.squares / max(self.count, 1)) ** 0.5


NOTHING = Moments(0.0, 0.0, 0.0)


def moments(values: Float[np.ndarray, "*any"], mask: Bool[np.ndarray, "*any"]) -> Moments:
    """Of the values where the mask is True, in float64. Of equal float32 numbers, `squares` is exactly 0."""
    kept = np.ravel(values) if mask.all() else values[mask]
    kept = kept.astype(np.float64)
    if not len(kept):
        return NOTHING
    # Not one pass over x and x^2: where the mean is large their difference is all rounding.
    mean = kept.sum() / len(kept)
    kept -= mean
    np.square(kept, out=kept)
    return Moments(float(len(kept)), float(mean), float(kept.sum()))


def joint_moments(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> Moments:
    """`moments` of all (values, mask) together."""
    if not parts:
        return NOTHING
    values, masks = zip(*parts, strict=True)
    return moments(np.concatenate(values), np.concatenate(masks))


def merged(parts: Iterable[Moments]) -> Moments:
    """Moments of the union of disjoint sets.

    Source: Chan, Golub & LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances".
    """
    total = NOTHING
    for part in parts:
        count = total.count + part.count
        if not part.count:
            continue
        apart = part.mean - total.mean
        total = Moments(
            count,
            total.mean + apart * part.count / count,
            total.squares + part.squares + apart**2 * total.count * part.count / count,
        )
    return total


def whiten(
    values: Float[np.ndarray, "*any"], mask: Bool[np.ndarray, "*any"], over: Moments
) -> Float32[np.ndarray, "*any"]:
    """(x - mean) / sqrt(variance + 1e-8) where the mask is True, 0 elsewhere.

    Args:
        over: of all the values that are whitened together. A single one becomes 0.

    Source: TRL's and verl's `masked_whiten`; the variance has ddof = 1.
    """
    white = (np.asarray(values, np.float64) - over.mean) / np.sqrt(over.variance + EPSILON)
    return np.where(mask, white, 0).astype(np.float32)
