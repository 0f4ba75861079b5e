"""Options of XLA's compilers, passed to `jax.jit`, so that no environment variable is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.sharding import Mesh

from app.mesh.chips import find_chip


def _large_tiles(kib: int) -> Mapping[str, str]:
    """Returns options that give matmuls `kib` KiB of the 128 MiB of on-chip memory (VMEM), for larger tiles.

    The matmuls of an update take 222 ms instead of 235 (1.5B model, v5e-8), and 239 instead of 303 (3B model,
    v6e-8). Even more memory is slower, since less is left for background copies.
    """
    return {
        "xla_tpu_scoped_vmem_limit_kib": str(kib),
        # Fusing the MLP's two matmuls is slower than computing them separately.
        "xla_tpu_dot_dot_fusion": "false",
    }


COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {
            # An update of SmolLM2 compiles in 4 s instead of 5.5 and runs at the same speed.
            "xla_backend_optimization_level": "1",
        },
        "tpu": {
            # Otherwise XLA multiplies by one shard of a weight after another and sums the results in bfloat16: less
            # exact, and 1.7 times slower than gathering the weight once (an update on v5e-8).
            "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
            # Gather weights while matmuls run, as on a v5e by default. In an update of 3B, this leaves 33 of 82 ms of
            # collectives exposed on v6e-8, and 123 of 213 on v4-16.
            "xla_enable_async_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion": "true",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
        },
        "gpu": {
            # XLA merges the MLP's gate and up matmuls, and then reads both weights by a slower routine: a decode step
            # of 256 rows of 1.5B took 4.02 ms instead of 3.62 on an H200. Matmuls over packed rows are larger and never
            # merged.
            "xla_gpu_dot_merger_threshold_mb": "16",
        },
    }
)
"""Maps a platform to its options. The figures for TPUs are compiler estimates; the others are measured."""

PACKED_ROWS_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {
            # Otherwise XLA converts the bfloat16 kernels of all layers to float32, which CPUs multiply, before the loop
            # over layers: an update of SmolLM2's adapters takes 1.8 GB instead of 1.2.
            "xla_disable_hlo_passes": "while-loop-invariant-code-motion",
        },
        "v5e": _large_tiles(64 * 1024),
        "v6e": {
            **_large_tiles(80 * 1024),
            # The SparseCores reduce gradients over the chips in the background: 11 ms of collectives stay exposed, not
            # 33.
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
            "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
        },
    }
)
"""Maps a chip or `cpu` to further options for scoring and updates, whose matmuls have thousands of tokens.

They would slow down decoding: a step of a 1.5B model on v5e-8 takes 7.8 ms instead of 7.2, without a decode kernel.
"""


def compiler_options(mesh: Mesh, *, packed_rows: bool = False) -> dict[str, str]:
    """Returns the options for programs on a mesh.

    Args:
        packed_rows: whether the programs are passes over packed rows, as in scoring and updates.
    """
    device = mesh.devices.flat[0]
    chip = find_chip(device.device_kind)
    further = PACKED_ROWS_OPTIONS.get(device.platform if chip is None else chip.name, {}) if packed_rows else {}
    options = {**COMPILER_OPTIONS.get(device.platform, {}), **further}
    # Respect a request for JAX's quickest compilation, which tests make.
    return {} if jax.config.read("jax_disable_most_optimizations") and device.platform == "cpu" else options
