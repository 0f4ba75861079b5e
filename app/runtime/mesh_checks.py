"""Checks that a model's sizes and a run's micro-batches fit a mesh."""

from __future__ import annotations

import math

from jax.sharding import Mesh

from app.mesh.placement import num_local_row_shards
from app.model.architecture import Architecture
from settings import Settings
from settings.errors import InputError


def check_tp_divides_heads(mesh: Mesh, architecture: Architecture, *, path: str) -> None:
    """Checks that tp splits the attention of the model from `path`.

    Raises:
        InputError: tp divides neither query heads nor KV heads, so every device would compute the whole attention.
    """
    tp, queries, keys = mesh.shape["tp"], architecture.num_query_heads, architecture.num_kv_heads
    if queries % tp and keys % tp:
        raise InputError(
            f"mesh.shape: tp = {tp} divides neither the {queries} query heads nor the {keys} kv heads of {path}; set "
            f"tp to a divisor of the query heads, such as {nearest_divisors(tp, queries)}"
        )


def check_experts(mesh: Mesh, architecture: Architecture, *, path: str) -> None:
    """Checks that tp splits the experts of the model from `path`.

    Raises:
        InputError: tp does not divide the experts.
    """
    tp, experts = mesh.shape["tp"], architecture.num_experts
    if experts is not None and experts % tp:
        raise InputError(
            f"mesh.shape: tp = {tp} does not divide the {experts} experts of {path}; set tp to a divisor such as "
            f"{nearest_divisors(tp, experts)}"
        )


def replicated_dim_notes(mesh: Mesh, architecture: Architecture) -> tuple[str, ...]:
    """Returns a note for every dim that tp does not divide and that is therefore replicated, which costs memory."""
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


def check_fixed_micro_batches(settings: Settings, mesh: Mesh) -> None:
    """Raises InputError, which suggests a valid value, if fixed update micro-batches do not divide over the devices.

    Packed micro-batches need no check: empty rows fill them.
    """
    group_size, devices = settings.rollout.group_size, num_local_row_shards(mesh)
    prompts = settings.rollout.prompts_per_step // settings.num_mini_batches
    field = "rollout.prompts_per_step" if settings.num_mini_batches == 1 else "algorithm.mini_batch_prompts"
    scopes = {"algorithm": settings.algorithm.rows_per_device}
    if settings.has_critic:
        scopes["critic"] = settings.critic.rows_per_device
    for scope, rows_per_device in scopes.items():
        if rows_per_device is None:
            continue
        otherwise = f"or set {scope}.max_tokens_per_device instead of {scope}.rows_per_device"
        if prompts * group_size % devices != 0:
            raise InputError(
                f"{field}: {prompts} prompts x rollout.group_size {group_size} = {prompts * group_size} samples do not "
                f"divide over the {devices} devices of a host (mesh.shape {settings.mesh.shape}); set it to a multiple "
                f"of {devices // math.gcd(devices, group_size)}, {otherwise}"
            )
        samples = prompts * group_size // devices
        if samples % rows_per_device != 0:
            raise InputError(
                f"{scope}.rows_per_device: {rows_per_device} does not divide the {samples} samples of an optimizer "
                f"step on each device ({prompts} prompts x rollout.group_size {group_size} over {devices} devices); "
                f"set it to {math.gcd(samples, rows_per_device)}, {otherwise}"
            )
