"""How q k^T becomes the scores of a softmax."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""Finite, so that a token with nothing to see gets a harmless softmax instead of NaN."""


class ScoreMod(NamedTuple):
    """Static: it is a part of the program."""

    scale: float | None = None
    """1 / sqrt(H) when None."""
    soft_cap: float | None = None
    """See `soft_capped`."""


DEFAULT_SCORE_MOD = ScoreMod()


def apply_soft_cap(x: Float[Array, "*dims"], cap: float | None) -> Float[Array, "*dims"]:
    """Cap tanh(x / cap): close to x while it is small, never beyond the cap. x itself when there is none."""
    return x if cap is None else cap * jnp.tanh(x / cap)
