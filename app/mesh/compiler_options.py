"""Options of XLA's compilers, passed to `jax.jit`, so that no environment variable is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import jax
from jax.sharding import Mesh

from app.mesh.chips import find_chip


def _large_tiles(kib: int) -> Mapping[str, str]:
    """Returns options that give products more of the 128 MiB on the chip, for larger tiles.

    Those of an update of 1.5B on v5e-8 take 222 instead of 235 ms, those of 3B on v6e-8 239 instead of 303 ms. More
    than this is slower, since less is left for copies in the background.
    """
    return {
        "xla_tpu_scoped_vmem_limit_kib": str(kib),
        # The MLP's two products as one are slower than on their own.
        "xla_tpu_dot_dot_fusion": "false",
    }


COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "cpu": {
            # An update of SmolLM2 compiles in 4 instead of 5.5 s and runs as fast.
            "xla_backend_optimization_level": "1",
        },
        "tpu": {
            # Otherwise XLA multiplies by one shard of a weight after another and adds the results up in bfloat16:
            # slower than gathering the weight once (1.7 times, for an update on v5e-8), and less exact.
            "xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000",
            # Weights are gathered while products run, as on a v5e by default. Of an update of 3B, 33 of 82 ms of
            # collectives stay exposed on v6e-8, and 123 of 213 on v4-16.
            "xla_enable_async_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion": "true",
            "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
            "xla_tpu_enable_async_collective_fusion_multiple_steps": "true",
            "xla_tpu_overlap_compute_collective_tc": "true",
        },
        "gpu": {
            # XLA merges the MLP's gate and up products, and then reads both weights by a slower routine: decoding a
            # token of 256 rows of 1.5B took 4.02 instead of 3.62 ms on an H200. Products over packed rows are larger
            # and never merged.
            "xla_gpu_dot_merger_threshold_mb": "16",
        },
    }
)
"""Options by platform. The reasons for TPUs are estimates by the compiler, those for others are measured."""

PACKED_ROWS_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "v5e": _large_tiles(64 * 1024),
        "v6e": {
            **_large_tiles(80 * 1024),
            # The SparseCores add gradients up over the chips meanwhile: 11 ms of collectives stay exposed, not 33.
            "xla_tpu_enable_sparse_core_collective_offload_reduce_scatter": "true",
            "xla_tpu_enable_sparse_core_reduce_scatter_v2": "true",
        },
    }
)
"""Further options by chip for scoring and updates, whose products have thousands of tokens. The few tokens of
decoding were slower with them: 7.8 instead of 7.2 ms for 1.5B on v5e-8, before its attention was a kernel."""


def compiler_options(mesh: Mesh, *, packed_rows: bool = False) -> dict[str, str]:
    """Returns the options for programs on a mesh.

    Args:
        packed_rows: whether they are passes over packed rows, as scoring and updates are.
    """
    device = mesh.devices.flat[0]
    chip = find_chip(device.device_kind)
    further = PACKED_ROWS_OPTIONS.get(chip.name, {}) if packed_rows and chip is not None else {}
    options = {**COMPILER_OPTIONS.get(device.platform, {}), **further}
    # Whoever asks JAX for the quickest compilation, as the tests do, gets it.
    return {} if jax.config.read("jax_disable_most_optimizations") and device.platform == "cpu" else options
