"""Tables of TPU chips and GPU cards, and the slices and hosts that virtual devices can simulate.

`mesh.pretend: v4-16` or `h100-8` shows a run's placement on devices that are not available. This module does not import
jax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from settings.errors import InputError, join_words
from settings.loading.fields import did_you_mean, nearest_names

MIB = 2**20
GIB = 2**30
MAX_KERNEL_BYTES = 96 * MIB
"""Maximum on-chip memory that a Pallas kernel may use."""


@dataclass(frozen=True)
class TpuChip:
    """A TPU chip, which is one JAX device.

    Source: the system architecture pages of Cloud TPU, https://cloud.google.com/tpu/docs/system-architecture-tpu-vm
    """

    name: str
    device_kind: str
    """JAX's `device_kind`, or its beginning."""
    hbm_bytes: int
    vmem_bytes: int
    """On-chip memory (VMEM) of a chip."""
    flops: float
    """Peak dense bfloat16 FLOPs per second."""
    ici_bytes_per_s: float
    """Outgoing bandwidth of a chip over all its links; the incoming bandwidth is the same."""
    hbm_bytes_per_s: float
    clock_hz: float
    """Clock rate of the TensorCore, to convert the compiler's estimates from cycles."""
    chips_per_host: int
    """Chips per host in slices of several hosts."""
    cores_in_name: int
    """Cores per chip as slice names count them: v4-16 is 8 chips with two cores each, v5e-16 is 16 chips."""
    max_chips_of_one_host: int
    """Maximum number of chips in a slice of one host."""

    @property
    def num_torus_dims(self) -> int:
        return 2 if self.cores_in_name == 1 else 3

    @property
    def ring_bytes_per_s(self) -> float:
        """Bytes per second that a chip sends in a ring of chips, over the two links of one torus dim."""
        return self.ici_bytes_per_s / self.num_torus_dims


TPU_CHIPS: Mapping[str, TpuChip] = MappingProxyType(
    {
        chip.name: chip
        for chip in (
            TpuChip("v4", "TPU v4", 32 * GIB, 16 * MIB, 275e12, 300e9, 1228e9, 1.05e9, 4, 2, 4),
            TpuChip("v5e", "TPU v5 lite", 16 * GIB, 128 * MIB, 197e12, 200e9, 819e9, 1.5e9, 4, 1, 8),
            TpuChip("v5p", "TPU v5", 95 * GIB, 64 * MIB, 459e12, 600e9, 2765e9, 1.75e9, 4, 2, 4),
            TpuChip("v6e", "TPU v6 lite", 32 * GIB, 128 * MIB, 918e12, 400e9, 1640e9, 1.75e9, 4, 1, 8),
        )
    }
)
"""Maps prefixes of slice names to chips. v5e comes before v5p, because `TPU v5 lite` also starts with v5p's kind."""

SLICE_SIZES: Mapping[int, tuple[int, ...]] = MappingProxyType(
    {1: (1, 4, 8, 16, 32, 64, 128, 256), 2: (8, 16, 32, 64, 128, 256, 512)}
)
"""`TpuChip.cores_in_name` -> numbers that slice names may contain, such as 16 in `v5e-16`; at most 256 chips."""


@dataclass(frozen=True)
class TpuSlice:
    """Connected chips, with the same number on each host. Chip i is on host i // chips_per_host."""

    name: str
    chip: TpuChip
    num_chips: int
    chips_per_host: int
    compiler = "tpu"
    """The platform under which JAX finds the compiler, and the package extra that installs it."""

    @property
    def num_hosts(self) -> int:
        return self.num_chips // self.chips_per_host

    @property
    def topology_name(self) -> str:
        """The name of the slice's topology in libtpu, such as `v4:2x2x2`."""
        family = "v5" if self.chip.name == "v5p" else self.chip.name
        return f"{family}:" + "x".join(map(str, _torus_sizes(self.num_chips, self.chip.num_torus_dims)))

    @property
    def topology_options(self) -> dict[str, Any]:
        """Options of the topology for libtpu: a host's chips along each dim and, on v4, two cores per device."""
        cores = {"chip_config_name": "megacore"} if self.chip.name == "v4" else {}
        return {"chips_per_host_bounds": (*_torus_sizes(self.chips_per_host, 2), 1), **cores}


@dataclass(frozen=True)
class GpuCard:
    """A GPU, which is one JAX device."""

    device_kind: str
    hbm_bytes: int
    description: str
    """The card's limits and speeds, as the text of XLA's `GpuDeviceInfoProto`."""


@dataclass(frozen=True)
class GpuHost:
    """One host with cards of one kind."""

    name: str
    chip: GpuCard
    num_chips: int
    chips_per_host: int
    num_hosts = 1
    compiler = "cuda"
    """The platform under which JAX finds the compiler, and the package extra that installs it."""

    @property
    def topology_name(self) -> str:
        return self.name

    @property
    def topology_options(self) -> dict[str, str]:
        """Options of the topology: one process on one host, and the card as XLA's `GpuTargetConfigProto` text."""
        kind = self.chip.device_kind
        device = f'name: "{kind}" device_memory_size: {self.chip.hbm_bytes} {self.chip.description}'
        target = f'platform_name: "CUDA" device_description_str: "{kind}" gpu_device_info {{ {device} }}'
        return {"target_config": target, "topology": f"1x1x{self.num_chips}"}


H100 = GpuCard(
    "NVIDIA H100 80GB HBM3",
    84_942_979_072,
    """
    cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
    memory_bandwidth: 3352320000000 l2_cache_size: 52428800
    shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
    registers_per_core_limit: 65536 registers_per_block_limit: 65536
    threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
    thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
    block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
    driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
    """,
)
"""The SXM card. The driver and runtime versions are those of the CUDA 13 compiler package.

Source: https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs."""

GPU_HOSTS: Mapping[str, GpuHost] = MappingProxyType(
    {host.name: host for host in (GpuHost(f"h100-{size}", H100, size, chips_per_host=size) for size in (1, 2, 4, 8))}
)
"""Maps names to hosts, such as `h100-8` to a host with eight H100 cards."""


def _torus_sizes(num_chips: int, num_dims: int) -> list[int]:
    """Returns powers of two with the product `num_chips`, as equal as possible, in the order that libtpu expects."""
    each, larger = divmod(num_chips.bit_length() - 1, num_dims)
    sizes = [2 ** (each + (dim >= num_dims - larger)) for dim in range(num_dims)]
    # A host's chips span the first two dims.
    return sizes if sizes[0] > 1 or num_dims == 2 else sizes[::-1]


def parse_slice(name: str) -> TpuSlice:
    """Returns the slice with a name such as `v4-16`; also accepts `v5litepod-16` for v5e.

    Raises:
        InputError: there is no such slice.
    """
    match = re.fullmatch(r"([a-z0-9]+)-([0-9]{1,6})", name.strip().lower().replace("v5litepod", "v5e"))
    chip = TPU_CHIPS.get(match[1]) if match else None
    if match is None or chip is None or int(match[2]) not in SLICE_SIZES[chip.cores_in_name]:
        names = [f"{chip.name}-{size}" for chip in TPU_CHIPS.values() for size in SLICE_SIZES[chip.cores_in_name]]
        names += GPU_HOSTS
        suggestion = did_you_mean(nearest_names(name, names)[:3])
        raise InputError(f"mesh.pretend: got {name!r}, expected one of {join_words(names)}{suggestion}")
    num_chips = int(match[2]) // chip.cores_in_name
    chips_per_host = num_chips if num_chips <= chip.max_chips_of_one_host else chip.chips_per_host
    return TpuSlice(match[0], chip, num_chips, chips_per_host)


def parse_pretended(name: str) -> TpuSlice | GpuHost:
    """Returns the slice or GPU host with a name such as `v4-16` or `h100-1`; see `parse_slice`."""
    return GPU_HOSTS.get(name.strip().lower()) or parse_slice(name)


def find_chip(device_kind: str) -> TpuChip | None:
    """Returns the chip of a JAX device kind, such as TPU v5 lite or TPU v5e; None for other devices."""
    device_kind = re.sub(r"^(TPU v\d)e\b", r"\1 lite", device_kind)
    return next((chip for chip in TPU_CHIPS.values() if device_kind.startswith(chip.device_kind)), None)


def kernel_bytes(device_kind: str) -> int:
    """Returns the bytes of on-chip memory that a Pallas kernel may use on a TPU, also for an unknown chip."""
    chip = find_chip(device_kind)
    # An unknown chip is assumed to have as little as the smallest known one.
    vmem_bytes = min(one.vmem_bytes for one in TPU_CHIPS.values()) if chip is None else chip.vmem_bytes
    return min(MAX_KERNEL_BYTES, vmem_bytes)


def padded_head_dim(head_dim: int) -> int:
    """Returns the head size as stored in a TPU's memory, padded to a multiple of 128 lanes."""
    return -(-head_dim // 128) * 128
