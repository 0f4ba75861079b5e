"""Note at launch about the communication that the placement of weights causes."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES, LOGICAL_AXIS_RULES
from app.mesh.devices import host_index


def weight_gather_notes(mesh: Mesh) -> tuple[str, ...]:
    """Returns a note if training gathers weights across hosts."""
    hosts, shards = num_hosts_per_weight(mesh), mesh.shape["fsdp"]
    if hosts == 1:
        return ()
    return (
        f"mesh.shape: fsdp {shards} spans {hosts} hosts, so every micro-batch gathers the weights across them; fsdp "
        f"inside a host (mesh.shape: auto) avoids this, with {hosts} times the weights and moments on each device",
    )


def num_hosts_per_weight(mesh: Mesh) -> int:
    """Returns the largest number of hosts that a weight's model dim is split over; 1 if none is gathered."""
    axis = AXES.index(str(LOGICAL_AXIS_RULES["embed"]))
    hosts = np.vectorize(host_index, otypes=[int])(mesh.devices)
    return max(len(set(group)) for group in np.moveaxis(hosts, axis, -1).reshape(-1, mesh.devices.shape[axis]).tolist())
