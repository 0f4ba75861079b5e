"""The device mesh: how many devices, on which axes, on how many hosts."""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import pkgutil
import shlex
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from app.distributed.cluster_detection import detect_cluster, is_cloud_tpu_vm
from app.distributed.rendezvous import ClusterMember, resolve_bind_address, verify_processes
from app.mesh.axis_rules import AXES
from app.mesh.simulated_slice import TpuSlice, parse_slice
from settings.errors import InputError
from settings.schema.mesh import MeshSettings as MeshSettings

M_MMAP_THRESHOLD = -3
"""glibc's name for it, in `man 3 mallopt`."""

MMAP_THRESHOLD_BYTES = 1 << 20

SHUTDOWN_TIMEOUT_S = 60
"""A host that is done waits so long for the others to be done, too."""

PROXY_VARIABLES = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"}
NO_PROXY_VARIABLE = "no_grpc_proxy"
"""Read by gRPC alone, instead of `no_proxy`."""
DEVICE_PLATFORMS = {"cpu": "cpu", "cuda": "gpu", "tpu": "tpu"}
"""By `mesh.platform`: what JAX's devices of it call themselves."""
_simulated_slice: TpuSlice | None = None
"""What the virtual devices of this process stand for since `start`."""


def initialize_distributed(settings: MeshSettings) -> None:
    """Sets up the backend and joins the other hosts. Must run before any other use of JAX.

    Several hosts are joined by the three coordinator settings; by themselves on a Cloud TPU VM of several hosts, and
    with `mesh.coordinator_address: auto` also under Slurm, Open MPI and Kubernetes. Otherwise this host works alone.

    Raises:
        InputError: hosts that do not come, or are not as many or not as numbered as expected, a port that cannot be
            used, a platform that is not there, or hosts with unequal numbers of devices.
    """
    initialize_local(settings)
    if _simulated_slice is not None:
        return
    member = _find_cluster_member(settings)
    _check_num_processes(settings, member)
    if member is None:
        return
    _bypass_proxies(member)
    command = shlex.join(["grpo", *sys.argv[1:]])
    verify_processes(member, timeout_s=settings.start_timeout_s, command=command, notify=_print_stderr)
    # Who is asked to stop tells the others itself; JAX's service would take SIGTERM away from us.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    jax.distributed.initialize(
        coordinator_address=member.coordinator_address,
        num_processes=member.num_processes,
        process_id=member.process_id,
        coordinator_bind_address=resolve_bind_address(member.coordinator_address) if member.process_id == 0 else None,
        initialization_timeout=settings.start_timeout_s,
        heartbeat_timeout_seconds=settings.heartbeat_s,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
    )
    check_equal_device_counts(global_devices(settings))


def initialize_local(settings: MeshSettings) -> None:
    """Sets up the backend of this host, whoever else `settings` name. Must run before any other use of JAX.

    Raises:
        InputError: the library for `mesh.platform` is not installed.
    """
    global _simulated_slice
    _simulated_slice = None if settings.pretend is None else parse_slice(settings.pretend)
    _configure_malloc()
    if _simulated_slice is not None:
        jax.config.update("jax_num_cpu_devices", _simulated_slice.num_chips)
        jax.config.update("jax_platforms", "cpu")
        return
    if settings.cpu_devices is not None:
        jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
    if settings.platform != "auto":
        _check_backend_installed(settings.platform)
        jax.config.update("jax_platforms", settings.platform)


def expects_other_hosts(settings: MeshSettings) -> bool:
    """Whether `start` would look for other hosts. Asks none of them, and starts no device."""
    if settings.pretend is not None:
        return False
    return settings.coordinator_address is not None or (settings.platform in ("auto", "tpu") and is_cloud_tpu_vm())


def _find_cluster_member(settings: MeshSettings) -> ClusterMember | None:
    """This host among several; None where it works alone."""
    if settings.coordinator_address not in (None, "auto"):
        assert settings.num_processes is not None and settings.process_id is not None
        return ClusterMember(settings.coordinator_address, settings.num_processes, settings.process_id)
    if not expects_other_hosts(settings):
        return None
    return detect_cluster(timeout_s=settings.start_timeout_s, required=settings.coordinator_address == "auto")


def _check_num_processes(settings: MeshSettings, member: ClusterMember | None) -> None:
    """Raises InputError where the platform knows of fewer hosts than `mesh.expect_processes`, or of more."""
    expected, found = settings.expect_processes, 1 if member is None else member.num_processes
    if expected is None or expected == found:
        return
    where = "this host works alone" if member is None else f"{found} processes join at {member.coordinator_address}"
    missing = f"; missing: {', '.join(map(str, range(found, expected)))}" if expected > found else ""
    raise InputError(
        f"mesh.expect_processes: expected {expected} processes and {where}{missing}. On every host give "
        "mesh.coordinator_address as host:port of process 0, with mesh.num_processes and mesh.process_id, or mend "
        "mesh.expect_processes"
    )


def _bypass_proxies(member: ClusterMember) -> None:
    """Hosts talk to process 0 by gRPC, which would ask a proxy for it where one is set, and wait for that for ever."""
    found = sorted(name for name in os.environ if name.lower() in PROXY_VARIABLES)
    if found:
        host = member.coordinator_address.rpartition(":")[0]
        direct = os.environ.get(NO_PROXY_VARIABLE) or os.environ.get("no_proxy")
        os.environ[NO_PROXY_VARIABLE] = f"{direct},{host}" if direct else host
        _print_stderr(
            f"warning: {', '.join(found)} set in the environment: the hosts reach {host} without a proxy; unset it if "
            "they do not find each other"
        )


def _print_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _check_backend_installed(platform: str) -> None:
    """Before other hosts wait for this one."""
    plugins = [
        module.name
        for module in pkgutil.iter_modules(getattr(find_spec("jax_plugins"), "submodule_search_locations", None) or [])
    ]
    there = {
        "cpu": True,
        "tpu": find_spec("libtpu") is not None or "TPU_LIBRARY_PATH" in os.environ,
        "cuda": any("cuda" in name for name in plugins),
    }
    if not there[platform]:
        raise _missing_platform_error(
            platform, f"JAX's library for it is not installed: pip install -e '.[{platform}]'"
        )


def _missing_platform_error(platform: str, reason: str) -> InputError:
    return InputError(
        f"mesh.platform: {platform} was asked for and there is none: {reason}; or set mesh.platform: auto"
    )


def global_devices(settings: MeshSettings) -> Sequence[Any]:
    """All devices of all hosts. `start` must have run.

    Raises:
        InputError: `mesh.platform` has none.
    """
    try:
        found = jax.devices()
    except (RuntimeError, AssertionError) as error:  # the latter where JAX knows nothing of the platform
        if settings.platform == "auto":
            raise
        said = f", JAX says {str(error).splitlines()[0]!r}" if str(error) else ""
        raise _missing_platform_error(settings.platform, f"no device of it was found{said}") from error
    if settings.platform != "auto" and found[0].platform != DEVICE_PLATFORMS[settings.platform]:
        raise _missing_platform_error(settings.platform, f"JAX has started with {found[0].platform} devices")
    return found


def check_equal_device_counts(devices: Sequence[Any]) -> None:
    """Raises InputError where hosts have different numbers of devices: rows are dealt out evenly."""
    per_host = Counter(host_index(device) for device in devices)
    if len(set(per_host.values())) > 1:
        told = ", ".join(f"host {host}: {count}" for host, count in sorted(per_host.items()))
        raise InputError(
            f"mesh.shape: hosts have different numbers of devices ({told}), and rows are dealt out evenly; give every "
            "host as many (on CPU hosts: mesh.cpu_devices)"
        )


def _configure_malloc() -> None:
    """Arrays of a MiB and up get memory of their own, where the C library lets us ask (glibc).

    Its own threshold rises to 32 MiB once a larger array was freed. One policy's decoding weights, an array per
    layer, then leave holes that no later array fits, and stay resident through the update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


def host_index(device: Any) -> int:
    """The number of the host that a device belongs to."""
    return device.process_index if _simulated_slice is None else device.id // _simulated_slice.chips_per_host


def simulated_slice() -> TpuSlice | None:
    """The slice that this process's virtual devices stand for; None where devices are what they are."""
    return _simulated_slice


def device_platform(device: Any) -> str:
    """`cpu`, `gpu` or `tpu`."""
    return device.platform if _simulated_slice is None else "tpu"


def device_kind(device: Any) -> str:
    """What JAX calls its kind."""
    return device.device_kind if _simulated_slice is None else _simulated_slice.chip.device_kind


def local_devices() -> list[Any]:
    """This host's; of a pretended slice those of its first host."""
    return [device for device in jax.local_devices() if _simulated_slice is None or host_index(device) == 0]


def num_hosts(mesh: DeviceMesh) -> int:
    """Hosts whose devices are on a mesh: 1 of an island, also where many have joined."""
    return _count_hosts(mesh.devices.flat)


def _count_hosts(devices: Iterable[Any]) -> int:
    return len({host_index(device) for device in devices})


def parse_mesh_shape(text: str, *, num_devices: int, num_processes: int) -> tuple[int, int, int]:
    """(dp, fsdp, tp) whose product is `num_devices`.

    `auto` puts dp across hosts and fsdp inside a host, so that weights are gathered over fast links.

    Args:
        text: as `mesh.shape` holds it.

    Raises:
        InputError: a product that does not fit.
    """
    if text == "auto":
        assert num_devices % num_processes == 0, "hosts have as many devices each"
        return num_processes, num_devices // num_processes, 1
    sizes = tuple(map(int, text.split(",")))
    known = math.prod(size for size in sizes if size != -1)
    if num_devices % known != 0 or (-1 not in sizes and known != num_devices):
        raise InputError(
            f"mesh.shape: {text!r} asks for {'a multiple of ' if -1 in sizes else ''}{known} devices and there "
            f"are {num_devices}; the nearest shapes that fit: {' or '.join(nearest_shapes(sizes, num_devices))}"
        )
    dp, fsdp, tp = (num_devices // known if size == -1 else size for size in sizes)
    return dp, fsdp, tp


def nearest_shapes(sizes: Sequence[int], num_devices: int) -> list[str]:
    """The shapes of so many devices that differ by the smallest factors from sizes that do not fit, at most two.

    A -1 stays what it is: it fits whatever the others leave.
    """

    def distance(shape: Sequence[int]) -> tuple[float, float]:
        """Of two as near, the one whose tp is nearer: it is what a model's heads must divide by."""
        steps = [abs(math.log(a / b)) if b != -1 else 0.0 for a, b in zip(shape, sizes, strict=True)]
        return round(sum(steps), 9), steps[-1]

    divisors = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
    fitting = [s for s in itertools.product(divisors, repeat=len(sizes)) if math.prod(s) == num_devices]
    kept = [tuple(-1 if b == -1 else a for a, b in zip(shape, sizes, strict=True)) for shape in fitting]
    distances = dict(zip(kept, map(distance, fitting), strict=True))
    return [",".join(map(str, shape)) for shape in sorted(distances, key=distances.__getitem__)[:2]]


def make_mesh(settings: MeshSettings) -> DeviceMesh:
    """The mesh over all devices of all hosts. Axes are Auto: XLA places what we do not constrain.

    In the order that suits the links between devices best, where that leaves the rows of every host together and tp
    inside hosts; else host by host.

    Raises:
        InputError: a shape that the devices do not make.
    """
    found = global_devices(settings)
    check_equal_device_counts(found)
    shape = parse_mesh_shape(settings.shape, num_devices=len(found), num_processes=_count_hosts(found))
    axis_types = (AxisType.Auto,) * len(AXES)
    mesh = jax.make_mesh(shape, AXES, axis_types=axis_types, devices=found)
    if is_grouped_by_host(mesh):
        return mesh
    in_order = sorted(found, key=lambda device: (host_index(device), device.id))
    return DeviceMesh(np.asarray(in_order).reshape(shape), AXES, axis_types=axis_types)


def is_grouped_by_host(mesh: DeviceMesh) -> bool:
    """Whether the devices of each host follow each other, those of host 0 first."""
    hosts = [host_index(device) for device in mesh.devices.flat]
    return hosts == sorted(hosts)
