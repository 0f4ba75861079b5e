"""Devices that are not there, for which the accelerator's own compiler compiles programs without running them."""

from __future__ import annotations

import os
from typing import Any

from jax.experimental import topologies

from app.mesh.tpu_chips import TpuSlice


def compile_only_devices(slice: TpuSlice) -> list[Any]:
    """Returns the devices of a TPU slice from libtpu's description of its topology."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=slice.topology_name, chips_per_host_bounds=slice.host_bounds
    )
    return list(description.devices)
