"""Measures how evenly a step uses the experts, and how often sampler and trainer choose different ones."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from app.batching.token_batch import TokenBatch
from app.model.experts import UNRECORDED


class RouteCounts(NamedTuple):
    """Counts over the positions that predict tokens written by the policy."""

    load: Float32[Array, "L E"]
    """Number of tokens routed to each expert in each layer."""
    differing: Float32[Array, ""] | None
    """Number of (token, layer) pairs whose recorded experts differ from the router's choice; None = no replay."""
    recorded: Float32[Array, ""] | None
    """Number of (token, layer) pairs with recorded experts; None = no replay."""


def count_routes(live: Int32[Array, "L R T k"], rows: TokenBatch, num_experts: int) -> RouteCounts:
    """Counts how often each expert is chosen, and how often recorded routes differ from the router's choices.

    Args:
        live: the routers' own choices, used where no experts are recorded.
    """
    places = jnp.maximum(rows.logits_indices, 0)

    def before_targets(routes: Int32[Array, "L R T k"]) -> Int32[Array, "L R C k"]:
        return jnp.take_along_axis(routes, places[None, :, :, None], axis=2)

    chosen, mask = before_targets(live), rows.loss_mask
    differing = recorded = None
    if rows.routes is not None:
        replayed = before_targets(jnp.moveaxis(rows.routes, 2, 0).astype(jnp.int32))
        is_known = jnp.all(replayed != UNRECORDED, axis=-1) & mask
        differs = jnp.any(jnp.sort(replayed, axis=-1) != jnp.sort(chosen, axis=-1), axis=-1)
        recorded = jnp.sum(is_known, dtype=jnp.float32)
        differing = jnp.sum(differs & is_known, dtype=jnp.float32)
        chosen = jnp.where(is_known[..., None], replayed, chosen)
    passes = (chosen[..., None] == jnp.arange(num_experts)) & mask[..., None, None]
    return RouteCounts(jnp.sum(passes, axis=(1, 2, 3), dtype=jnp.float32), differing, recorded)


def route_metrics(counts: RouteCounts) -> dict[str, Float32[Array, ""]]:
    """Returns the ratio of largest to mean expert load, averaged over layers, and the fraction of differing routes.

    The fraction is missing without replay, and NaN if no routes are recorded.
    """
    mean = jnp.mean(counts.load, axis=1)
    # 0 if the policy wrote no token.
    shares = jnp.where(mean > 0, jnp.max(counts.load, axis=1) / mean, 0)
    metrics = {"rollout/fullest_expert": jnp.mean(shares)}
    if counts.differing is not None and counts.recorded is not None:
        metrics["rollout/route_difference"] = counts.differing / counts.recorded
    return metrics
