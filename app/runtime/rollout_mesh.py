"""Chooses the mesh for generation: the devices of the training mesh, split differently between rows and weights."""

from __future__ import annotations

import math
import re

import jax.numpy as jnp
from jax.sharding import Mesh

from app.mesh.chips import TpuChip, find_chip
from app.mesh.device_mesh import num_hosts, with_tp
from app.mesh.devices import device_kind
from app.mesh.placement import bytes_per_device, num_row_shards
from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import abstract_cache, cache_shapes
from app.records.text_format import format_count
from app.runtime.mesh_checks import nearest_divisors
from settings import Settings
from settings.errors import InputError

HOP_S = 1.5e-6
"""Assumed latency of a message between neighbouring chips, in seconds."""
MIN_GAIN = 0.3
"""Fraction of the estimated decode time that another mesh must save to be chosen.

The estimate omits work that takes equally long on every mesh (LM head, sampling), and prefills, which tp slows down.
"""


def rollout_mesh(settings: Settings, mesh: Mesh, definition: DecoderDefinition) -> Mesh:
    """Returns the mesh for generation: the devices of the training mesh, arranged as `rollout.mesh` says.

    Raises:
        InputError: dp and tp do not divide the devices, or tp does not divide the model's heads or experts.
    """
    wanted = settings.rollout.mesh
    if wanted == "training":
        return mesh
    if wanted == "auto":
        return _fastest(settings, mesh, definition)
    sizes = {name: int(size) for name, size in re.findall(r"(dp|tp)=(\d+)", wanted)}
    tp, per_host, arch = sizes["tp"], mesh.size // num_hosts(mesh), definition.architecture
    split = {"query heads": arch.num_query_heads} | ({"experts": arch.num_experts} if arch.num_experts else {})
    fitting = nearest_divisors(tp, math.gcd(per_host, *split.values()))
    if sizes.get("dp", mesh.size // tp) * tp != mesh.size or per_host % tp:
        raise InputError(
            f"rollout.mesh: {wanted!r} does not divide the {format_count(mesh.size, 'device')} of mesh.shape, "
            f"{per_host} on each host: dp x tp must be {mesh.size}, and tp must divide {per_host}, since every host "
            f"generates whole rows; omit dp and set tp={fitting}, or set rollout.mesh to auto"
        )
    for name, size in split.items():
        if size % tp:
            raise InputError(
                f"rollout.mesh: {wanted!r} does not divide the {size} {name} of the model; set tp to {fitting}, "
                "which divides them and the devices of a host"
            )
    return with_tp(mesh, tp)


def rollout_mesh_notes(settings: Settings, mesh: Mesh, generation: Mesh, definition: DecoderDefinition) -> list[str]:
    """Returns a note if tp differs between generation and training; otherwise an empty list."""
    dp, tp, before = num_row_shards(generation), generation.shape["tp"], mesh.shape["tp"]
    if tp == before:
        return []
    if settings.rollout.has_workers:
        return [f"rollout.mesh: {settings.rollout.mesh}: each worker's weights are split over tp={tp} of its devices"]
    line = f"rollout.mesh: {settings.rollout.mesh}: weights split over tp={tp} and rows over dp={dp} during generation"
    chip = find_chip(device_kind(mesh.devices.flat[0]))
    if chip is None:
        return [line]
    ours, others = (token_seconds(settings, with_tp(mesh, size), definition, chip) * 1e3 for size in (tp, before))
    return [f"{line}: {ours:.1f} ms for a token of every row by estimate, {others:.1f} with tp={before} of mesh.shape"]


def token_seconds(settings: Settings, mesh: Mesh, definition: DecoderDefinition, chip: TpuChip) -> float:
    """Returns the estimated seconds of a decode step: memory reads plus ring all-reduces over tp.

    Weights are read once, and the KV caches of all rows are assumed to be half full.
    """
    rollout, arch = settings.rollout, definition.architecture
    dtype = jnp.dtype(settings.model.dtype)
    rows_of_all = math.ceil(rollout.num_rows * num_hosts(mesh) / mesh.size) * mesh.size
    length = settings.data.max_prompt_length + rollout.max_new_tokens
    shapes = cache_shapes(arch, rows_of_all, length, dtype, is_int8=rollout.kv_cache == "int8")
    cache = abstract_cache(shapes, mesh)
    read = bytes_per_device(abstract_decode_weights(definition, mesh, dtype)) + bytes_per_device(cache) / 2
    hops = 2 * (mesh.shape["tp"] - 1)
    summed = rows_of_all // num_row_shards(mesh) * arch.model_dim * dtype.itemsize
    a_sum = hops * (HOP_S + summed / mesh.shape["tp"] / chip.ring_bytes_per_s)
    # One after attention, one after the MLP.
    return read / chip.hbm_bytes_per_s + 2 * arch.num_layers * a_sum


def _fastest(settings: Settings, mesh: Mesh, definition: DecoderDefinition) -> Mesh:
    """Returns the mesh with the shortest estimated decode step; the training mesh if no estimate is possible."""
    chip = find_chip(device_kind(mesh.devices.flat[0]))
    if chip is None or settings.rollout.has_workers:
        return mesh
    now, per_host, arch = mesh.shape["tp"], mesh.size // num_hosts(mesh), definition.architecture
    sizes = [arch.num_query_heads, arch.num_experts or arch.mlp_dim, per_host]
    slots = settings.rollout.slots
    if isinstance(slots, int) and slots % per_host:
        # If tp does not divide the key heads, slots are split over all devices.
        sizes.append(arch.num_kv_heads)
    # With a smaller tp than in training, weights might not fit.
    fitting = [tp for tp in range(now, per_host + 1) if not any(size % tp for size in sizes)]
    seconds = {tp: token_seconds(settings, with_tp(mesh, tp), definition, chip) for tp in {now, *fitting}}
    best = min(seconds, key=seconds.__getitem__)
    return with_tp(mesh, best) if seconds[best] < (1 - MIN_GAIN) * seconds[now] else mesh
