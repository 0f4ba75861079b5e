"""The links over which weights are gathered, and the least time that a gather takes."""

from __future__ import annotations

import numpy as np
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES, LOGICAL_AXIS_RULES
from app.mesh.devices import host_index
from app.mesh.tpu_chips import TpuChip


def num_hosts_per_weight(mesh: Mesh) -> int:
    """Returns the largest number of hosts that a weight's model dim is split over; 1 if none is gathered."""
    return max(len(set(group)) for group in _gather_groups(mesh).tolist())


def all_gather_time_s(mesh: Mesh, num_bytes: float, chip: TpuChip) -> float:
    """Returns the seconds that each device takes to receive `num_bytes` of weights, without other traffic.

    Within one slice, the bytes use all links of the chips. Otherwise they use the hosts' network, where every ring of
    devices that gathers across hosts leaves each host once.
    """
    slices = {getattr(device, "slice_index", 0) for device in mesh.devices.flat}
    if len(slices) == 1:
        return num_bytes / chip.ici_bytes_per_s
    groups = _gather_groups(mesh)
    rings = max(int((groups == host).any(axis=1).sum()) for host in np.unique(groups))
    return num_bytes * rings / chip.dcn_bytes_per_s_per_host


def _gather_groups(mesh: Mesh) -> np.ndarray:
    """Returns the host of each device as [groups, devices]; a group shares one model dim."""
    axis = AXES.index(str(LOGICAL_AXIS_RULES["embed"]))
    hosts = np.vectorize(host_index, otypes=[int])(mesh.devices)
    return np.moveaxis(hosts, axis, -1).reshape(-1, mesh.devices.shape[axis])
