"""What a launch tells of where weights lie: how many bytes that moves, and between whom."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import Mesh

from app.mesh.interconnect import gather_s, hosts_of_a_weight
from app.mesh.placement import bytes_per_device
from app.mesh.simulated_slice import chip_of
from app.mesh.topology import device_kind_of
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import abstract_decode_weights
from settings import Settings


def placement_lines(settings: Settings, definition: DecoderDefinition, mesh: Mesh) -> tuple[str, ...]:
    """A warning where every token moves the weights, and a note where training gathers them across hosts."""
    lines = []
    if settings.rollout.decode_layout == "fsdp":
        lines += _decoding_line(definition, mesh, jnp.dtype(settings.model.dtype))
    hosts, shards = hosts_of_a_weight(mesh), mesh.shape["fsdp"]
    if hosts > 1:
        lines.append(
            f"mesh.shape: fsdp {shards} spans {hosts} hosts, so every micro-batch gathers the weights across them; fsdp"
            f" inside a host (mesh.shape: auto) keeps that off, at {hosts} times the weights and moments on each device"
        )
    return tuple(lines)


def _decoding_line(definition: DecoderDefinition, mesh: Mesh, dtype: jnp.dtype) -> list[str]:
    held, whole = (
        bytes_per_device(abstract_decode_weights(definition, mesh, dtype, layout)) for layout in ("fsdp", "gathered")
    )
    # What a device does not hold comes in: (n - 1) / n of each weight that is split over n.
    moved = whole - held
    if moved == 0:
        return []
    chip, hosts = chip_of(device_kind_of(mesh.devices.flat[0])), hosts_of_a_weight(mesh)
    seconds = f", at best {gather_s(mesh, moved, chip):.2g} s" if chip else ""
    across = f", across {hosts} hosts" if hosts > 1 else ""
    return [
        f"warning: rollout.decode_layout: fsdp moves {_size(moved)} of weights into each device at every token "
        f"step{across}{seconds}; gathered moves none and holds {_size(whole)} instead of {_size(held)}"
    ]


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
