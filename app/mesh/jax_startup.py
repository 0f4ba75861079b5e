"""Starts JAX on this host and joins the other hosts."""

from __future__ import annotations

import ctypes
import os
import sys

import jax

from app.distributed.collectives import max_over_hosts
from app.distributed.rendezvous import (
    ClusterMember,
    detect_cluster,
    is_cloud_tpu_vm,
    resolve_bind_address,
    verify_processes,
)
from app.distributed.shutdown import HEARTBEAT_S
from app.mesh.chips import parse_pretended
from app.mesh.devices import (
    check_equal_device_counts,
    global_devices,
    missing_platform_error,
    quiet_libtpu,
    simulate_slice,
    simulated_slice,
)
from app.mesh.program_cache import share_program_cache, use_program_cache
from app.records.text_format import format_count
from settings.errors import InputError
from settings.loading.backends import is_backend_installed
from settings.schema.mesh import MeshSettings

M_MMAP_THRESHOLD = -3
"""The number of the parameter in glibc's `mallopt`; see `man 3 mallopt`."""

MMAP_THRESHOLD_BYTES = 1 << 20

SHUTDOWN_TIMEOUT_S = 60
"""Maximum time, in seconds, that a finished host waits for the others."""

PROXY_VARIABLES = {"http_proxy", "https_proxy", "all_proxy", "grpc_proxy"}
NO_PROXY_VARIABLE = "no_grpc_proxy"
"""The environment variable that gRPC reads instead of `no_proxy`."""


_joined_before = False
"""Whether `join_other_hosts` has joined the hosts, so that `initialize_distributed` need not do so again."""


def initialize_distributed(settings: MeshSettings, *, compiles: bool = False) -> None:
    """Sets up the backend and joins the other hosts, unless the command has already called `join_other_hosts`.

    Args:
        compiles: see `simulate_slice`.

    Raises:
        InputError: see `join_other_hosts`.
    """
    global _joined_before
    if not join_other_hosts(settings, compiles=compiles) and simulated_slice() is None:
        global_devices(settings)
    _joined_before = False


def join_other_hosts(settings: MeshSettings, *, compiles: bool = False) -> bool:
    """Sets up the backend, joins the other hosts if there are any, and returns whether it has joined any.

    Must run before any other use of JAX. Hosts are joined by the three coordinator settings, automatically on a Cloud
    TPU VM of several hosts, and with `mesh.coordinator_address: auto` also under Slurm, Open MPI and Kubernetes.
    Otherwise this host runs alone.

    Args:
        compiles: see `simulate_slice`.

    Raises:
        InputError: a host is missing or has an unexpected id, the port or the platform is not available, or the hosts
            have different numbers of devices.
    """
    global _joined_before
    if _joined_before:
        return True
    initialize_local(settings, compiles=compiles)
    if simulated_slice() is not None:
        return False
    member = None
    if settings.coordinator_address not in (None, "auto"):
        assert settings.num_processes is not None and settings.process_id is not None
        member = ClusterMember(settings.coordinator_address, settings.num_processes, settings.process_id)
    elif expects_other_hosts(settings):
        is_auto = settings.coordinator_address == "auto"
        member = detect_cluster(timeout_s=settings.start_timeout_s, required=is_auto)
    _check_num_processes(settings, member)
    if member is None:
        return False
    if jax.distributed.is_initialized():
        raise InputError(
            "mesh.coordinator_address: JAX has already joined other hosts in this process, and can do so only once; "
            "start a new process on each host"
        )
    _bypass_proxies(member)
    verify_processes(member, timeout_s=settings.start_timeout_s)
    # The program handles SIGTERM itself and notifies the other hosts; JAX's service would replace its handler.
    jax.config.update("jax_enable_preemption_service", False)
    jax.config.update("jax_check_proxy_envs", False)
    jax.distributed.initialize(
        coordinator_address=member.coordinator_address,
        num_processes=member.num_processes,
        process_id=member.process_id,
        coordinator_bind_address=resolve_bind_address(member.coordinator_address) if member.process_id == 0 else None,
        initialization_timeout=settings.start_timeout_s,
        heartbeat_timeout_seconds=HEARTBEAT_S,
        shutdown_timeout_seconds=SHUTDOWN_TIMEOUT_S,
    )
    check_equal_device_counts(global_devices(settings))
    share_program_cache()
    # Gloo waits only 30 s for the first exchange, and the next one may follow minutes of one host's work.
    max_over_hosts(0)
    _joined_before = True
    return True


def initialize_local(settings: MeshSettings, *, compiles: bool = False) -> None:
    """Sets up the backend of this host without joining other hosts. Must run before any other use of JAX.

    Args:
        compiles: see `simulate_slice`.

    Raises:
        InputError: the library for `mesh.platform` is not installed.
    """
    pretended = None if settings.pretend is None else parse_pretended(settings.pretend)
    _configure_malloc()
    if pretended is not None:
        if not compiles:
            jax.config.update("jax_num_cpu_devices", pretended.num_chips)
        # CUDA's plugin looks for a GPU when it is loaded, unless JAX uses another platform.
        jax.config.update("jax_platforms", "cpu")
        simulate_slice(pretended, compiles=compiles)
        return
    simulate_slice(None)
    if settings.cpu_devices is not None:
        try:
            jax.config.update("jax_num_cpu_devices", settings.cpu_devices)
        except RuntimeError:
            raise InputError(
                f"mesh.cpu_devices: got {settings.cpu_devices}, but JAX has already started in this process with "
                f"{format_count(jax.local_device_count(), 'device')}; set it before the first use of "
                "JAX, in a new process"
            ) from None
    if settings.platform == "auto":
        if not is_cloud_tpu_vm():
            # JAX tries libtpu first if it is installed, even on machines that only compile for TPUs.
            quiet_libtpu()
    else:
        _check_backend_installed(settings.platform)
        jax.config.update("jax_platforms", settings.platform)
    if not compiles:
        use_program_cache()


def expects_other_hosts(settings: MeshSettings) -> bool:
    """Returns whether `initialize_distributed` would look for other hosts."""
    if settings.pretend is not None:
        return False
    return settings.coordinator_address is not None or (settings.platform in ("auto", "tpu") and is_cloud_tpu_vm())


def _check_num_processes(settings: MeshSettings, member: ClusterMember | None) -> None:
    """Raises InputError if the number of hosts is not `mesh.expect_processes`."""
    expected, actual = settings.expect_processes, 1 if member is None else member.num_processes
    if expected is None or expected == actual:
        return
    where = "this host runs alone" if member is None else f"{actual} processes join at {member.coordinator_address}"
    last = f" to {expected - 1}" if expected - 1 > actual else ""
    missing = f"; missing process ids: {actual}{last}" if expected > actual else ""
    raise InputError(
        f"mesh.expect_processes: got {expected}, but {where}{missing}. On every host, set "
        "mesh.coordinator_address to host:port of process 0, and mesh.num_processes and mesh.process_id; or correct "
        "mesh.expect_processes"
    )


def _bypass_proxies(member: ClusterMember) -> None:
    """Makes gRPC connect to process 0 without a proxy, since hosts could wait forever for the proxy."""
    proxies = sorted(name for name in os.environ if name.lower() in PROXY_VARIABLES)
    if proxies:
        host = member.coordinator_address.rpartition(":")[0]
        direct = os.environ.get(NO_PROXY_VARIABLE) or os.environ.get("no_proxy")
        os.environ[NO_PROXY_VARIABLE] = f"{direct},{host}" if direct else host
        text = f"warning: {', '.join(proxies)} is set; hosts connect to {host} without a proxy"
        print(f"{text}. Unset it if they cannot connect", file=sys.stderr, flush=True)


def _check_backend_installed(platform: str) -> None:
    """Raises InputError if JAX's library for the platform is missing, before other hosts wait for this one."""
    if not is_backend_installed(platform):
        raise missing_platform_error(
            platform, "JAX's library for it is not installed", f"run pip install -e '.[{platform}]'"
        )


def _configure_malloc() -> None:
    """Makes glibc allocate arrays of 1 MiB and more outside of its heap.

    The default threshold can rise to 32 MiB as arrays are freed. A policy's per-layer decode weights would then leave
    holes in the heap that fit no later array and stay resident during the update.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
