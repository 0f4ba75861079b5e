"""Tests of what is special to the GPU kernels: where they run, and their programs for a GPU that is not there.

Their results are tested with those of the TPU kernels.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.mesh.axis_rules import AXES
from app.mesh.chips import GPU_HOSTS
from app.mesh.devices import compile_only_devices
from app.model.attention.cached import decode_block_size, extend_cache
from app.model.attention.dense import DEFAULT_SCORE_MOD, ScoreMod
from app.model.attention.packed import GPU_BLOCK_SIZE, PARALLEL_BLOCKING, packed_attention, platform_blocking
from app.model.attention.pairs import Blocking
from app.model.grouped_product import grouped_product
from app.model.kv_cache import cache_shapes
from app.model.segment_layout import SegmentLayout
from tests.model.test_block_attention import with_gradients
from tests.tiny import EVEN

pytestmark = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")

KERNELS = ("attention_forward", "attention_backward_query", "attention_backward_keys")


@pytest.fixture
def gpus() -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX for CUDA is not installed: pip install -e '.[cuda]'")


def mesh_of(host: str) -> jax.sharding.Mesh:
    devices = compile_only_devices(GPU_HOSTS[host])
    return jax.sharding.Mesh(np.array(devices).reshape(1, -1, 1), AXES)


def compiled(host: str, *, head_dim: int, dtype: type, rows: int = 1, score_mod: ScoreMod = DEFAULT_SCORE_MOD) -> str:
    """Returns the text of attention and its gradients over rows of 100 tokens, with two query heads for a key head."""
    mesh = mesh_of(host)
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))

    def shape(*sizes: int, dtype: type = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, *sizes), dtype, sharding=by_row)

    def attention(query, keys, values, layout):
        return packed_attention(query, keys, values, layout, window=40, score_mod=score_mod)

    query, keys, ids = shape(100, 4, head_dim), shape(2, 100, head_dim), shape(100, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        lowered = jax.jit(with_gradients(attention)).lower(query, keys, keys, query, SegmentLayout(ids, ids, ids))
    return lowered.compile().as_text() or ""


@pytest.mark.parametrize("head_dim", [10, 64, 128, 256])
def test_the_kernels_compile_for_an_h100(head_dim: int, gpus: None) -> None:
    text = compiled("h100-1", head_dim=head_dim, dtype=jnp.bfloat16, score_mod=ScoreMod(0.4, 50.0))
    assert [text.count(f'name = "{kernel}"') for kernel in KERNELS] == [1, 1, 1]


@pytest.mark.parametrize(
    ("dim", "num_rows", "dtype"),
    [(256, 2048, "bfloat16"), (256, 2048, "float32"), (96, 64, "bfloat16"), (10, 7, "bfloat16")],
)
def test_the_grouped_products_compile_for_an_h100_and_are_not_expanded(
    dim: int, num_rows: int, dtype: Any, gpus: None
) -> None:
    num_groups, mesh = 16, mesh_of("h100-1")

    def shape(*sizes: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    def both(x: jax.Array, matrices: jax.Array, sizes: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(lambda x, matrices: grouped_product(x, matrices, sizes), x, matrices)
        return y, backward(dy)

    x, matrices, sizes = shape(num_rows, dim), shape(num_groups, dim, 2 * dim), shape(num_groups, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        program = jax.jit(both).lower(x, matrices, sizes, shape(num_rows, 2 * dim)).compile()
    text = program.as_text() or ""
    assert [text.count(f'name = "{name}"') for name in ("grouped_product", "grouped_matrix_gradient")] == [2, 1]
    if dim != 10:  # not padded to the tiles of tensor cores
        analysis: Any = program.memory_analysis()
        assert analysis.temp_size_in_bytes < 4 * num_rows * dim + 2**16


@pytest.mark.parametrize("is_int8", [False, True], ids=["bfloat16", "int8"])
@pytest.mark.parametrize(("head_dim", "block_size", "window"), [(64, 16, None), (128, 256, 100), (256, 64, None)])
def test_the_decode_kernel_compiles_for_an_h100(
    head_dim: int, block_size: int, window: int | None, is_int8: bool, gpus: None
) -> None:
    architecture = replace(EVEN, num_kv_heads=2, num_query_heads=12, head_dim=head_dim)
    mesh = mesh_of("h100-1")

    def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    with jax.set_mesh(mesh):
        chunk = decode_block_size(architecture, block_size, jnp.bfloat16)
        assert chunk == min(block_size, GPU_BLOCK_SIZE)
        assert decode_block_size(architecture, block_size, jnp.float32) is None
        decode = jax.jit(
            lambda *arrays: extend_cache(*arrays, window=window, block_size=chunk),
            donate_argnums=3,
        )
        new, (pool, *_) = (
            shape(8, 2, 1, head_dim),
            cache_shapes(architecture, 65, block_size, jnp.bfloat16, is_int8=is_int8),
        )
        arrays = shape(8, 1, 12, head_dim), new, new, pool, shape(8, dtype=jnp.int32), shape(8, dtype=jnp.bool)
        compiled = decode.lower(*arrays, shape(8, 8, dtype=jnp.int32)).compile()
    assert (compiled.as_text() or "").count('name = "attention_decode"') == 1
    # The pools are updated in place.
    analysis: Any = compiled.memory_analysis()
    pools = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool))
    assert analysis.alias_size_in_bytes >= pools and analysis.temp_size_in_bytes < pools


def test_each_gpu_computes_its_own_rows(gpus: None) -> None:
    text = compiled("h100-4", head_dim=64, dtype=jnp.bfloat16, rows=8)
    # Two rows, padded to whole blocks.
    assert f"bf16[{2 * 2 * GPU_BLOCK_SIZE},4,64]" in text
    assert "all-gather" not in text and "all-reduce" not in text


def test_arrays_in_float32_take_no_kernel(gpus: None) -> None:
    assert not any(kernel in compiled("h100-1", head_dim=64, dtype=jnp.float32) for kernel in KERNELS)
    with jax.set_mesh(mesh_of("h100-1")):
        assert platform_blocking(8192, 64, jnp.float32, group_size=1) == PARALLEL_BLOCKING
        assert platform_blocking(8192, 64, jnp.bfloat16, group_size=1) == Blocking(GPU_BLOCK_SIZE, 1, kernel="gpu")
