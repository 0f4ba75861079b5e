"""The table of GPU cards that virtual devices can simulate, as XLA describes them to its compiler.

`mesh.pretend: h100-8` shows a run's placement on a host that is not available. This module does not import jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True)
class GpuCard:
    """A GPU, which is one JAX device."""

    device_kind: str
    hbm_bytes: int
    description: str
    """The card's limits and speeds as fields of XLA's `GpuDeviceInfoProto`."""


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
        """Options of its topology: one process on one host; the cards are XLA's `GpuTargetConfigProto` in text form."""
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
"""Source: https://github.com/openxla/xla/tree/main/xla/backends/gpu/target_config/specs, for the SXM card; the versions
are those of CUDA 13, which the compiler's package brings along."""

GPU_HOSTS: Mapping[str, GpuHost] = MappingProxyType(
    {host.name: host for host in (GpuHost(f"h100-{size}", H100, size, chips_per_host=size) for size in (1, 2, 4, 8))}
)
"""Hosts by name, the card's and the number of cards."""
