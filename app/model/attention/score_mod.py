"""Scaling and soft caps of attention scores and logits."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from app.model.architecture import Architecture

MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of an invisible key: finite, so that the softmax of a token without visible keys is not NaN."""


class ScoreMod(NamedTuple):
    """Scale and soft cap of attention scores; static arguments of compiled functions."""

    scale: float | None = None
    """Factor of q k^T; None = 1 / sqrt(H)."""
    soft_cap: float | None = None
    """Cap for `apply_soft_cap`; None = no cap."""

    @classmethod
    def of(cls, architecture: Architecture) -> ScoreMod:
        return cls(architecture.query_scale, architecture.attention_soft_cap)

    def scale_for(self, head_dim: int) -> float:
        """Returns the factor of q k^T for heads of this size."""
        return self.scale or head_dim**-0.5


DEFAULT_SCORE_MOD = ScoreMod()


def apply_soft_cap(x: Float[Array, "*dims"], cap: float | None) -> Float[Array, "*dims"]:
    """Returns cap tanh(x / cap), which is close to x for small x and never exceeds the cap; x if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)
