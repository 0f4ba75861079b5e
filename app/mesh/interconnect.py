"""Which links weights are gathered over, and how long that takes at best."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES, LOGICAL_AXIS_RULES
from app.mesh.simulated_slice import TpuChip
from app.mesh.topology import host_index


def num_hosts_per_weight(mesh: Mesh) -> int:
    """Over how many hosts the shards of one weight's model dim lie: 1 where none of them is gathered across hosts."""
    return max(len(set(group)) for group in _gather_groups(mesh).tolist())


def all_gather_time_s(mesh: Mesh, num_bytes: float, chip: TpuChip) -> float:
    """Seconds in which each device takes in so many bytes from those it shares weights with, nothing else going on.

    Over all links of the chips where they are one slice; else over the network of the hosts, of which every ring of
    devices that gathers across hosts leaves each host once.
    """
    slices = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    if len(slices) == 1:
        return num_bytes / chip.ici_bytes_per_s
    groups = _gather_groups(mesh)
    rings = max(int((groups == host).any(axis=1).sum()) for host in np.unique(groups))
    return num_bytes * rings / chip.dcn_bytes_per_s_per_host


def _gather_groups(mesh: Mesh) -> np.ndarray:
    """[groups, devices of a group]: the host of each device, those together that hold the parts of one model dim."""
    axis = AXES.index(str(LOGICAL_AXIS_RULES["embed"]))
    hosts = np.vectorize(host_index, otypes=[int])(mesh.devices)
    return np.moveaxis(hosts, axis, -1).reshape(-1, mesh.devices.shape[axis])
