"""Options of XLA's compilers by platform, passed to `jax.jit`, so that no environment variable is needed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from jax.sharding import Mesh

COMPILER_OPTIONS: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # Otherwise XLA multiplies by one shard of a weight after another and adds the results up in bfloat16: slower
        # than gathering the weight once (by libtpu's estimate 1.7 times, for an update on v5e-8), and less exact.
        "tpu": MappingProxyType({"xla_jf_spmd_threshold_for_windowed_einsum_mib": "1000000"}),
    }
)
"""Options of the compiler by the platform of the mesh's devices."""


def compiler_options(mesh: Mesh) -> dict[str, str]:
    """Returns the options for programs on a mesh."""
    return dict(COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {}))
