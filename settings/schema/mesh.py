"""The settings of the mesh: devices and how they are laid out, hosts and how they find each other."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from settings.schema.section import Section


def _validate_mesh_shape(value: str) -> str:
    """`auto`, or sizes of dp, fsdp, tp; whether the devices divide so is for `app.mesh` to say."""
    if value == "auto":
        return value
    sizes = value.replace(" ", "").split(",")
    if len(sizes) != 3 or not all(re.fullmatch(r"-1|[1-9][0-9]{0,5}", size) for size in sizes):
        raise ValueError("expected `auto` or three sizes `dp,fsdp,tp`, each at least 1 or -1, as in `1,-1,1`")
    if sizes.count("-1") > 1:
        raise ValueError("expected at most one -1: it takes the devices that the other sizes leave")
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
    shape: Annotated[str, AfterValidator(_validate_mesh_shape)] = Field(
        default="auto",
        description="`dp,fsdp,tp`, -1 takes what is left; `auto`: dp across hosts, fsdp inside one.",
    )
    platform: Literal["auto", "cpu", "cuda", "tpu"] = Field(
        default="auto",
        description="Whose devices: the best that are there (auto), or these and no others; a run on a machine without "
        "them stops.",
    )
    cpu_devices: int | None = Field(default=None, ge=1, le=64, description="Virtual devices of a CPU host.")
    pretend: str | None = Field(
        default=None,
        min_length=1,
        description="A TPU slice that virtual devices stand for, as in `v4-16` or `v5e-8`: for `inspect-mesh` and "
        "`train --dry-run`, which need none of its hardware.",
    )
    coordinator_address: Annotated[str, AfterValidator(_validate_host_and_port)] | None = Field(
        default=None,
        description="`host:port` of process 0; `auto` asks Cloud TPU, Slurm, Open MPI or Kubernetes for the hosts; "
        "null: all hosts of a Cloud TPU VM, elsewhere this one alone.",
    )
    num_processes: int | None = Field(default=None, ge=1, description="Hosts; given with `host:port`.")
    process_id: int | None = Field(default=None, ge=0, description="This host's number, from 0; given with the same.")
    expect_processes: int | None = Field(
        default=None,
        ge=1,
        description="Stop where not exactly so many hosts join, however they find each other; null: any number.",
    )
    start_timeout_s: int = Field(
        default=300, ge=1, le=86_400, description="How long a host waits for the others when it starts."
    )
    heartbeat_s: int = Field(
        default=60, ge=2, le=3600, description="Hosts end when another has been silent for so long."
    )
