"""The devices of this run and their memory, including simulated and compile-only devices."""

from __future__ import annotations

import functools
import logging
import os
import resource
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental import topologies
from jax.stages import Compiled

from app.mesh.chips import GpuHost, TpuSlice
from app.records.versions import version_of
from settings.errors import InputError
from settings.loading.backends import DEVICE_FILES, may_have
from settings.schema.mesh import MeshSettings

_warn_once = functools.cache(logging.getLogger(__name__).warning)

DEVICE_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""Maps the value of `mesh.platform` to the `platform` of JAX's devices."""
_simulated_slice: TpuSlice | GpuHost | None = None
"""The slice or GPU host that this process's virtual devices simulate."""
_simulated_devices: list[Any] | None = None

LIBTPU_VARIABLES = {
    # Otherwise libtpu looks for its machine on the network.
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Any type will do: the topology determines the target.
    "TPU_ACCELERATOR_TYPE": "v5e-1",
    # Otherwise it refuses to load beside a process that uses the chips; compiling does not use them.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
}


def simulate_slice(slice: TpuSlice | GpuHost | None, *, compiles: bool = False) -> None:
    """Makes the virtual devices of this process simulate a slice or a GPU host; None for real devices.

    Args:
        compiles: whether to use compile-only devices, which run nothing, so that programs compile for the hardware.
    """
    global _simulated_slice, _simulated_devices
    _simulated_slice = slice
    _simulated_devices = compile_only_devices(slice) if slice is not None and compiles else None


def missing_platform_error(platform: str, reason: str, way_out: str = "") -> InputError:
    """Returns the error for a `mesh.platform` whose devices are not available; `auto` is always a way out."""
    way_out = f"{way_out}, or set it to auto" if way_out else "set it to auto"
    return InputError(f"mesh.platform: {platform} is not available: {reason}; {way_out}")


def global_devices(settings: MeshSettings) -> Sequence[Any]:
    """Returns all devices of all hosts, after `initialize_distributed`.

    Raises:
        InputError: there are no devices of `mesh.platform`.
    """
    if _simulated_slice is not None:
        return _simulated_devices or jax.devices()
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:  # AssertionError: JAX does not know the platform
        cause = f" ({str(error).splitlines()[0]})" if str(error) else ""
        if settings.platform == "auto":
            asked = os.environ.get("JAX_PLATFORMS")
            if not asked:
                raise
            raise InputError(
                f"JAX_PLATFORMS: {asked!r} is not available: JAX found no such device{cause}; unset JAX_PLATFORMS, "
                "so that JAX uses the best available device, or run pip install -e '.[tpu]' or '.[cuda]' on a "
                "machine with such a device"
            ) from error
        raise missing_platform_error(settings.platform, f"JAX found no such device{cause}") from error
    if settings.platform != "auto" and devices[0].platform != DEVICE_PLATFORMS[settings.platform]:
        raise missing_platform_error(settings.platform, f"JAX has started with {devices[0].platform} devices")
    if extra := unused_accelerator(settings, devices[0].platform):
        _warn_once(
            "this machine has an accelerator, but JAX runs on the CPU; run pip install -e '.[%s]', unset JAX_PLATFORMS "
            "if it is set, or set mesh.platform: cpu",
            extra,
        )
    return devices


def unused_accelerator(settings: MeshSettings, platform: str) -> str | None:
    """Returns the package extra to install if JAX falls back to the CPU of a machine with an accelerator; else None."""
    if platform != "cpu" or settings.platform != "auto" or settings.cpu_devices is not None:
        return None
    return next(filter(may_have, DEVICE_FILES), None)


def check_equal_device_counts(devices: Sequence[Any]) -> None:
    """Raises InputError if hosts have different numbers of devices; rows are split evenly over all devices."""
    per_host = Counter(host_index(device) for device in devices)
    if len(set(per_host.values())) > 1:
        counts = ", ".join(f"host {host}: {count}" for host, count in sorted(per_host.items()))
        raise InputError(
            f"mesh.shape: hosts have different numbers of devices ({counts}), but rows are split evenly; give every "
            "host the same number (on CPU hosts: mesh.cpu_devices)"
        )


def host_index(device: Any) -> int:
    """Returns the index of a device's host."""
    if _simulated_slice is not None and _simulated_devices is None:
        return device.id // _simulated_slice.chips_per_host
    return device.process_index


def simulated_slice() -> TpuSlice | GpuHost | None:
    """Returns the slice or GPU host that this process's virtual devices simulate; None for real devices."""
    return _simulated_slice


def is_compile_only() -> bool:
    """Returns whether the devices exist only for a compiler and run nothing."""
    return _simulated_devices is not None


def device_platform(device: Any) -> str:
    """Returns the platform of a device, real or simulated: `cpu`, `gpu` or `tpu`."""
    return device.platform if _simulated_slice is None else DEVICE_PLATFORMS[_simulated_slice.compiler]


def device_kind(device: Any) -> str:
    """Returns JAX's name for the kind of a device, real or simulated."""
    return device.device_kind if _simulated_slice is None else _simulated_slice.chip.device_kind


def local_devices() -> list[Any]:
    """Returns the devices of this host; for a simulated slice, of its first host."""
    return [
        device
        for device in _simulated_devices or jax.local_devices()
        if _simulated_slice is None or host_index(device) == 0
    ]


def devices_of_submesh(devices: Sequence[Any]) -> Sequence[Any]:
    """Returns the given devices or, if programs are only compiled, a whole slice of as many devices.

    Compilers number the devices of a program from 0, and know only whole slices.
    """
    if _simulated_slice is None or _simulated_devices is None or len(devices).bit_count() != 1:
        return devices
    return compile_only_devices(replace(_simulated_slice, num_chips=len(devices), chips_per_host=len(devices)))


def peak_memory_bytes() -> int:
    """Returns the highest peak memory of the local devices in bytes; on CPUs, the peak memory of this process."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    if all(stats):
        return max(s["peak_bytes_in_use"] for s in stats)
    # Linux reports KiB, macOS bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def device_memory_bytes() -> int | None:
    """Returns the memory of a local device in bytes; on a CPU, its share of the host's memory; None if unknown."""
    if (simulated := simulated_slice()) is not None:
        return simulated.chip.hbm_bytes
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    if all("bytes_limit" in s for s in stats):
        return min(s["bytes_limit"] for s in stats)
    if jax.local_devices()[0].platform != "cpu":
        return None
    return host_memory_bytes() // jax.local_device_count()


def program_memory_bytes(program: Compiled) -> int:
    """Returns the bytes that a program needs on each device by the compiler's count, including its arguments."""
    found: Any = program.memory_analysis()
    outputs = found.output_size_in_bytes - found.alias_size_in_bytes
    return found.argument_size_in_bytes + outputs + found.temp_size_in_bytes


def host_memory_bytes(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Returns the memory of the machine in bytes, or the limit of its container if that is lower."""
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    allowed = limit.read_text().strip() if limit.is_file() else "max"
    return min(installed, int(allowed)) if allowed.isdigit() else installed


def compile_only_devices(place: TpuSlice | GpuHost) -> list[Any]:
    """Returns compile-only devices for a TPU slice or a GPU host.

    Raises:
        InputError: the compiler is not installed, or does not know the devices.
    """
    quiet_libtpu()
    try:
        description = topologies.get_topology_desc(
            platform=place.compiler, topology_name=place.topology_name, **place.topology_options
        )
    except Exception as error:  # JAX raises several types of exceptions
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"mesh.pretend: cannot compile for {place.name}: {reason} (with {compiler_versions()}); run pip install -e "
            f"'.[{place.compiler}]', which installs this JAX's compiler on any x86-64 Linux, with or without the device"
        ) from None
    return list(description.devices)


def quiet_libtpu() -> None:
    """Keeps libtpu from searching for a TPU and complaining on stderr that there is none."""
    for name, value in LIBTPU_VARIABLES.items():
        os.environ.setdefault(name, value)


def compiler_versions() -> str:
    """Returns the versions of JAX and of the accelerators' compilers."""
    return ", ".join(f"{name} {version_of(name)}" for name in ("jax", "libtpu", "jax-cuda13-plugin"))
