"""Attention with dense masks (every query with every key), and the scale and soft cap of scores.

Scores, softmax and accumulation are float32: in bfloat16 the logits of long rows lose the digits that determine the
softmax.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from app.model.architecture import Architecture

ATTENTION_SCOPE = "attention"
"""The name scope of attention in compiled programs."""


MASK_VALUE = -0.7 * float(jnp.finfo(jnp.float32).max)
"""The score of an invisible key: finite, so that the softmax of a token without visible keys is not NaN."""


class ScoreMod(NamedTuple):
    """Scale and soft cap of attention scores; a static argument of compiled functions."""

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
    """Returns cap tanh(x / cap): close to x for small x, and between -cap and cap; x itself if there is no cap."""
    return x if cap is None else cap * jnp.tanh(x / cap)


@jax.named_scope(ATTENTION_SCOPE)
def dot_product_attention(
    query: Float[Array, "R T Q H"],
    keys: Float[Array, "R K S H"],
    values: Float[Array, "R K S H"],
    visible_mask: Bool[Array, "R T S"],
    score_mod: ScoreMod = DEFAULT_SCORE_MOD,
) -> Float[Array, "R T Q H"]:
    """Returns softmax(cap(scale q k^T)) v over the visible keys; Q / K query heads share a key head.

    Source: Vaswani et al. 2017; grouped queries: Ainslie et al. 2023; soft caps: Riviere et al. 2024 (Gemma 2).
    """
    rows, num_tokens, num_query_heads, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(rows, num_tokens, num_kv_heads, num_query_heads // num_kv_heads, head_dim)
    scores = jnp.einsum("rtkgh,rksh->rkgts", grouped, keys, preferred_element_type=jnp.float32)
    scores = apply_soft_cap(scores * score_mod.scale_for(head_dim), score_mod.soft_cap)
    scores = jnp.where(visible_mask[:, None, None], scores, MASK_VALUE)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    # XLA accumulates in float32 anyway. Requesting it would also make the result float32, and XLA on CPUs cannot run
    # this matmul of bfloat16 arrays with several rows and key heads.
    mixed = jnp.einsum("rkgts,rksh->rtkgh", weights, values)
    return mixed.reshape(query.shape).astype(query.dtype)
