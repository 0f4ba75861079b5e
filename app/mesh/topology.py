"""The device mesh: how many devices, on which axes, on how many hosts."""

from __future__ import annotations

import ctypes
import math
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from app.mesh.axis_rules import AXES
from app.mesh.pretend import Slice, parse_slice
from settings.errors import InputError
from settings.mesh_section import Mesh as MeshSettings

M_MMAP_THRESHOLD = -3
"""glibc's name for it, in `man 3 mallopt`."""

MAPPED_BYTES = 1 << 20

_pretended: Slice | None = None
"""What the virtual devices of this process stand for since `start`."""


def start(settings: MeshSettings) -> None:
    """Sets up the backend and joins the other hosts. Must run before any other use of JAX.

    Several hosts are joined by the three coordinator settings, or by `mesh.coordinator_address: auto` where the
    platform knows its hosts (Cloud TPU, Slurm, ...); without them this host works alone.
    """
    global _pretended
    _pretended = None if settings.pretend is None else parse_slice(settings.pretend)
    _return_freed_arrays_to_the_system()
    if _pretended is not None:
        jax.config.update("jax_num_cpu_devices", _pretended.num_chips)
        jax.config.update("jax_platforms", "cpu")
        return
    if settings.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
    if settings.platform != "auto":
        jax.config.update("jax_platforms", settings.platform)
    if settings.coordinator_address is None:
        return
    named = {
        "coordinator_address": settings.coordinator_address,
        "num_processes": settings.num_processes,
        "process_id": settings.process_id,
    }
    jax.distributed.initialize(
        **({} if settings.coordinator_address == "auto" else named),
        initialization_timeout=settings.start_timeout_s,
        heartbeat_timeout_seconds=settings.heartbeat_s,
    )


def _return_freed_arrays_to_the_system() -> None:
    """Arrays of a MiB and up get memory of their own, where the C library lets us ask (glibc).

    Its own threshold rises to 32 MiB once a larger array was freed. One policy's decoding weights, an array per
    layer, then leave holes that no later array fits, and stay resident through the update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES)


def host_of(device: Any) -> int:
    """The number of the host that a device belongs to."""
    return device.process_index if _pretended is None else device.id // _pretended.chips_per_host


def pretended() -> Slice | None:
    """The slice that this process's virtual devices stand for; None where devices are what they are."""
    return _pretended


def platform_of(device: Any) -> str:
    """`cpu`, `gpu` or `tpu`."""
    return device.platform if _pretended is None else "tpu"


def device_kind_of(device: Any) -> str:
    """What JAX calls its kind."""
    return device.device_kind if _pretended is None else _pretended.chip.device_kind


def local_devices() -> list[Any]:
    """This host's; of a pretended slice those of its first host."""
    return [device for device in jax.local_devices() if _pretended is None or host_of(device) == 0]


def num_hosts(mesh: DeviceMesh) -> int:
    """Hosts whose devices are on a mesh: 1 of an island, also where many have joined."""
    return len({host_of(device) for device in mesh.devices.flat})


def parse_shape(text: str, *, num_devices: int, num_processes: int) -> tuple[int, int, int]:
    """(dp, fsdp, tp) whose product is `num_devices`.

    `auto` puts dp across hosts and fsdp inside a host, so that weights are gathered over fast links.

    Raises:
        InputError: not three numbers, more than one -1, or a product that does not fit.
    """
    if text.strip() == "auto":
        return num_processes, num_devices // num_processes, 1
    parts = [part.strip() for part in text.split(",")]
    try:
        sizes = [int(part) for part in parts]
    except ValueError:
        sizes = []
    if len(sizes) != len(AXES) or any(size == 0 or size < -1 for size in sizes) or sizes.count(-1) > 1:
        raise InputError(
            f"mesh.shape: got {text!r}; expected `auto` or three comma-separated sizes dp,fsdp,tp, "
            "each at least 1, at most one of them -1 (takes what is left), such as `1,-1,1`"
        )
    known = math.prod(size for size in sizes if size != -1)
    if num_devices % known != 0 or (-1 not in sizes and known != num_devices):
        divisors = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
        raise InputError(
            f"mesh.shape: {text!r} asks for {'a multiple of ' if -1 in sizes else ''}{known} devices and there "
            f"are {num_devices}; sizes that fit divide {num_devices}: {', '.join(map(str, divisors))}"
        )
    dp, fsdp, tp = (num_devices // known if size == -1 else size for size in sizes)
    return dp, fsdp, tp


def make_mesh(settings: MeshSettings) -> DeviceMesh:
    """The mesh over all devices of all hosts. Axes are Auto: XLA places what we do not constrain."""
    num_processes = jax.process_count() if _pretended is None else _pretended.num_hosts
    shape = parse_shape(settings.shape, num_devices=jax.device_count(), num_processes=num_processes)
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES))
