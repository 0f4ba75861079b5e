"""Checks that a model's sizes fit the tp of a mesh."""

from __future__ import annotations

from jax.sharding import Mesh

from app.model.architecture import Architecture
from settings.errors import InputError


def check_tp_divides_heads(mesh: Mesh, architecture: Architecture, *, path: str) -> None:
    """Checks that tp splits the attention of the model from `path`.

    Raises:
        InputError: tp divides neither query heads nor kv heads, so every device would compute all of the attention.
    """
    tp, queries, keys = mesh.shape["tp"], architecture.num_query_heads, architecture.num_kv_heads
    if queries % tp and keys % tp:
        raise InputError(
            f"mesh.shape: tp = {tp} divides neither the {queries} query heads nor the {keys} kv heads of {path}; the "
            f"nearest tp that divides the query heads: {nearest_divisors(tp, queries)}"
        )


def check_experts(mesh: Mesh, architecture: Architecture, *, path: str) -> None:
    """Checks that tp splits the experts of the model from `path`.

    Raises:
        InputError: tp does not divide the experts.
    """
    tp, experts = mesh.shape["tp"], architecture.num_experts
    if experts is not None and experts % tp:
        raise InputError(
            f"mesh.shape: tp = {tp} does not divide the {experts} experts of {path}; the nearest tp that does: "
            f"{nearest_divisors(tp, experts)}"
        )


def replicated_dim_notes(mesh: Mesh, architecture: Architecture) -> tuple[str, ...]:
    """Returns a note for every dim that tp does not divide: replicating it on every device costs memory."""
    tp = mesh.shape["tp"]
    sizes = {"kv heads": architecture.num_kv_heads, "tokens of the vocabulary": architecture.vocab_size}
    if architecture.num_experts is None:
        sizes["units of a feed-forward layer"] = architecture.mlp_dim
    return tuple(
        f"mesh.shape: tp = {tp} does not divide the {size:,} {name}, so every device holds them all; the nearest tp "
        f"that does: {nearest_divisors(tp, size)}"
        for name, size in sizes.items()
        if size % tp
    )


def nearest_divisors(tp: int, size: int) -> str:
    """Returns the nearest divisors of `size` below and above `tp`."""
    below = max(n for n in range(1, tp + 1) if size % n == 0)
    above = next((n for n in range(tp, size + 1) if size % n == 0), None)
    return " or ".join(str(n) for n in dict.fromkeys((below, above)) if n is not None)
