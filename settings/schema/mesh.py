"""Settings of the mesh: its devices and shape, and the hosts that join it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from settings.schema.section import Section


def _validate_mesh_shape(value: str) -> str:
    """Accepts `auto` or sizes of dp, fsdp, tp; `app.mesh` checks them against the number of devices."""
    if value == "auto":
        return value
    sizes = value.replace(" ", "").split(",")
    if len(sizes) != 3 or not all(re.fullmatch(r"-1|[1-9][0-9]{0,5}", size) for size in sizes):
        raise ValueError("expected `auto` or three sizes `dp,fsdp,tp`, each at least 1 or -1, as in `1,-1,1`")
    if sizes.count("-1") > 1:
        raise ValueError("expected at most one -1, because it takes all remaining devices")
    return ",".join(sizes)


def _validate_host_and_port(value: str) -> str:
    if value == "auto":
        return value
    if not re.fullmatch(r"\S+:[0-9]{1,5}", value):
        raise ValueError("expected `host:port`, as in `10.0.0.2:8476`, or `auto`")
    if not 1 <= int(value.rpartition(":")[2]) <= 65_535:
        raise ValueError("expected a port from 1 to 65535")
    return value


class MeshSettings(Section):
    shape: Annotated[str, AfterValidator(_validate_mesh_shape)] = "auto"
    """Number of devices along the mesh axes dp (data parallelism), fsdp (sharded weights) and tp (tensor parallelism),
    such as `1,-1,1`; a -1 takes the remaining devices. `auto` uses dp across hosts and fsdp inside a host."""
    platform: Literal["auto", "cpu", "cuda", "tpu"] = "auto"
    """Platform of the devices; the run stops if JAX does not find it. `auto` uses the best one available."""
    cpu_devices: int | None = Field(default=None, ge=1, le=64)
    """Number of virtual devices on a CPU host, to try a mesh without accelerators. If null, there is one."""
    pretend: str | None = Field(default=None, min_length=1)
    """TPU slice or GPUs to simulate with virtual devices, such as `v4-16`, `v5e-8` or `h100-1`, for `inspect-mesh` and
    `train --dry-run`. It overrides the other device settings. If null, the real devices are used."""
    coordinator_address: Annotated[str, AfterValidator(_validate_host_and_port)] | None = None
    """Address of process 0 as `host:port`, or `auto` to get all hosts from Cloud TPU, Slurm, Open MPI or Kubernetes. If
    null, a Cloud TPU VM uses all hosts of its slice, and other machines only themselves."""
    num_processes: int | None = Field(default=None, ge=1, le=2**16)
    """Number of hosts. It is required if `mesh.coordinator_address` is `host:port`."""
    process_id: int | None = Field(default=None, ge=0)
    """Index of this host, beginning with 0. It is required if `mesh.coordinator_address` is `host:port`."""
    expect_processes: int | None = Field(default=None, ge=1, le=2**16)
    """Stops the run unless exactly this many hosts join. If null, any number may join."""
    start_timeout_s: int = Field(default=300, ge=1, le=86_400)
    """Number of seconds that each host waits for the others when a run starts."""
