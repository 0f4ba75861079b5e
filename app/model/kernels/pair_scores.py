"""Scores of block pairs inside Pallas kernels, on any platform: visibility, values and gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from app.model.attention.dense import ScoreMod, apply_soft_cap
from app.model.segment_layout import SegmentLayout

INFO_ROWS = 8
"""Number of rows of `token_info`: the rows of one int32 memory tile."""
MAX_BRANCHES = 1 << 16


def is_visible(
    query: tuple[Array, Array, Array], key: tuple[Array, Array], is_not_later: Array, window: Array
) -> Bool[Array, "rows columns"]:
    """Returns whether each query sees each key; arguments are broadcast to [queries, keys] or [keys, queries].

    Args:
        query: run, run of the prompt, and position of the queries; see `token_info`.
        key: run and position of the keys.
        is_not_later: whether the key is at or before the query in the row.
    """
    own_run, prompt_run, position = query
    run, key_position = key
    return ((run == own_run) | (run == prompt_run)) & is_not_later & (position - key_position < window)


def token_info(layout: SegmentLayout) -> Int32[Array, "I N"]:
    """Returns, per token: its run as a key, its run as a query, the run of its prompt, and its position.

    A run is a prompt or a completion. Padding has its own runs, so that nothing sees it and it sees nothing.
    """
    segment, branch, position = (x.reshape(-1) for x in layout)
    is_token, prompt_run = segment != 0, segment * MAX_BRANCHES
    rows = (
        jnp.where(is_token, prompt_run + branch, -1),
        jnp.where(is_token, prompt_run + branch, -2),
        jnp.where(is_token, prompt_run, -2),
        position,
    )
    return jnp.pad(jnp.stack(rows), ((0, INFO_ROWS - len(rows)), (0, 0)))


def pair_scores(
    score_mod: ScoreMod, scale: float, a: Array, b: Array, factors: Float32[Array, "1 n"] | None = None
) -> Float32[Array, "m n"]:
    """Returns the soft-capped scores of `a` (rows) against `b` (columns): queries against keys, or the transpose.

    Args:
        factors: scales of the columns, applied before the soft cap.
    """
    products = product(a, b, (1, 1)) * scale
    return apply_soft_cap(products if factors is None else products * factors, score_mod.soft_cap)


def pair_scores_grad(score_mod: ScoreMod, scores: Array, weights: Array, centered: Array) -> Float32[Array, "m n"]:
    """Returns the gradient of the uncapped scores, given the capped `scores` and their softmax, `weights`.

    Args:
        centered: the gradient of the weights minus its weighted mean per query.
    """
    grad = weights * centered
    return grad if score_mod.soft_cap is None else grad * (1 - jnp.square(scores / score_mod.soft_cap))


def product(a: Array, b: Array, dims: tuple[int, int]) -> Float32[Array, "m n"]:
    """Returns the float32 product of two matrices, contracted over dim dims[0] of `a` and dim dims[1] of `b`."""
    # Explicit precision, because JAX's default may be `highest`, with which kernels cannot multiply bfloat16.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
    return jax.lax.dot_general(
        a, b, (((dims[0],), (dims[1],)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
