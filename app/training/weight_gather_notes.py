"""Notes at launch about the communication that the placement of weights causes."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES, LOGICAL_AXIS_RULES
from app.mesh.devices import host_index
from app.mesh.placement import bytes_per_device
from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.records.text_format import format_bytes
from settings import Settings


def weight_gather_notes(settings: Settings, definition: DecoderDefinition, mesh: Mesh) -> tuple[str, ...]:
    """Returns a warning if every decoded token gathers weights, and a note if training gathers them across hosts."""
    lines = []
    if settings.rollout.decode_layout == "fsdp":
        lines += _fsdp_decode_warning(definition, mesh, jnp.dtype(settings.model.dtype))
    hosts, shards = num_hosts_per_weight(mesh), mesh.shape["fsdp"]
    if hosts > 1:
        lines.append(
            f"mesh.shape: fsdp {shards} spans {hosts} hosts, so every micro-batch gathers the weights across them; fsdp"
            f" inside a host (mesh.shape: auto) avoids this, with {hosts} times the weights and moments on each device"
        )
    return tuple(lines)


def _fsdp_decode_warning(definition: DecoderDefinition, mesh: Mesh, dtype: jnp.dtype) -> list[str]:
    held, whole = (
        bytes_per_device(abstract_decode_weights(definition, mesh, dtype, layout)) for layout in ("fsdp", "gathered")
    )
    # A device receives the parts that it does not hold: (n - 1) / n of each weight that is split over n devices.
    moved = whole - held
    if moved == 0:
        return []
    hosts = num_hosts_per_weight(mesh)
    across = f", across {hosts} hosts" if hosts > 1 else ""
    return [
        f"warning: rollout.decode_layout: fsdp moves {format_bytes(moved)} of weights into each device at every token "
        f"step{across}; gathered moves none and holds {format_bytes(whole)} instead of {format_bytes(held)}"
    ]


def num_hosts_per_weight(mesh: Mesh) -> int:
    """Returns the largest number of hosts that a weight's model dim is split over; 1 if none is gathered."""
    axis = AXES.index(str(LOGICAL_AXIS_RULES["embed"]))
    hosts = np.vectorize(host_index, otypes=[int])(mesh.devices)
    return max(len(set(group)) for group in np.moveaxis(hosts, axis, -1).reshape(-1, mesh.devices.shape[axis]).tolist())
