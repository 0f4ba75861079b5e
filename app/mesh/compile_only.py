"""Devices that are not there, for which the accelerator's own compiler compiles programs without running them."""

from __future__ import annotations

import os
from typing import Any

from jax.experimental import topologies

from app.mesh.chips import GpuHost, TpuSlice
from app.records.versions import version_of
from settings.errors import InputError

LIBTPU_VARIABLES = {
    # Otherwise it looks for its machine on the network.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Any type will do: the topology decides what it compiles for.
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    # Otherwise it refuses to load beside a process that uses the chips, which compiling does not.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


def compile_only_devices(place: TpuSlice | GpuHost) -> list[Any]:
    """Returns the devices of a TPU slice or of a host with GPUs, as the accelerator's compiler describes them.

    Raises:
        InputError: the compiler is not installed, or does not know the devices.
    """
    quiet_libtpu()
    try:
        description = topologies.get_topology_desc(
            platform=place.compiler, topology_name=place.topology_name, **place.topology_options
        )
    except Exception as error:  # JAX raises several types, some of them its own
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"mesh.pretend: cannot compile for {place.name}: {reason} (with {compiler_versions()}); run pip install -e "
            f"'.[{place.compiler}]', which installs the compiler that belongs to this JAX on any x86-64 Linux, with or "
            "without the device"
        ) from None
    return list(description.devices)


def quiet_libtpu() -> None:
    """Tells libtpu what it would otherwise look for, and complain on stderr of not finding, without TPU."""
    for name, value in LIBTPU_VARIABLES.items():
        os.environ.setdefault(name, value)


def compiler_versions() -> str:
    """Returns the versions of JAX and of the accelerators' compilers."""
    return ", ".join(f"{name} {version_of(name)}" for name in ("jax", "libtpu", "jax-cuda13-plugin"))
