"""Tests which programs contain the kernels, and that these compile for TPUs and GPUs without such a device."""

import functools
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from app.mesh.axis_rules import AXES
from app.mesh.chips import GPU_HOSTS, parse_slice
from app.mesh.compiler_options import compiler_options
from app.mesh.devices import compile_only_devices
from app.mesh.placement import row_sharding
from app.model.attention.cached import decode_block_size, extend_cache
from app.model.attention.packed import GPU_BLOCK_SIZE, PARALLEL_BLOCKING, packed_attention, platform_blocking
from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.grouped_product import grouped_product
from app.model.kernels.triton_backend import has_triton
from app.model.kv_cache import cache_shapes
from app.model.prefill_and_decode import prefill
from app.model.segment_layout import SegmentLayout, single_segment_layout
from settings import InputError
from tests.tiny import EVEN

FLOAT32 = jnp.dtype("float32")
LONG, SHORT = 200, 20
"""Numbers of tokens of a row of several XLA blocks, and of a row of a single block."""


def mesh_of(platform: str, kind: str = "", shape: tuple[int, int, int] = (1, 1, 1)) -> Any:
    return AbstractMesh(shape, AXES, (AxisType.Auto,) * 3, abstract_device=AbstractDevice(kind, None, platform))


@functools.cache
def traced(implementation, mesh: Any, num_tokens: int) -> tuple[str, str]:
    """Returns the programs of a forward and backward pass, and of a prefill."""
    definition = DecoderDefinition.create(replace(EVEN, attention_implementation=implementation))
    tokens = jax.ShapeDtypeStruct((16, num_tokens), jnp.int32)

    def loss(params, tokens):
        layout = single_segment_layout(jnp.ones(tokens.shape, bool))
        return jnp.sum(definition.bind(params).hidden(tokens, layout, dtype=FLOAT32))

    def fill(weights, tokens):
        return prefill(definition, weights, tokens, jnp.full(16, 3))

    with jax.sharding.use_abstract_mesh(mesh):
        weights = abstract_decode_weights(definition, mesh, FLOAT32)
        filled = jax.make_jaxpr(fill)(weights, tokens)
        return str(jax.make_jaxpr(jax.grad(loss))(definition.shapes, tokens)), str(filled)


V5E_16 = mesh_of("tpu", "TPU v5 lite", (4, 4, 1))


@pytest.mark.parametrize(
    ("implementation", "mesh", "num_tokens", "has_kernel"),
    [
        *(("auto", V5E_16, LONG, True), ("auto", mesh_of("tpu"), SHORT, True), ("kernel", mesh_of("tpu"), SHORT, True)),
        *(("xla", mesh_of("tpu"), LONG, False), ("auto", mesh_of("cpu"), LONG, False)),
    ],
    ids=["v5e-16", "short", "kernel", "xla", "cpu"],
)
def test_attention_kernels_are_chosen_by_platform_and_setting(implementation, mesh, num_tokens, has_kernel):
    gradients, filled = traced(implementation, mesh, num_tokens)
    assert ("attention_forward" in gradients, "attention_backward" in gradients) == (has_kernel, has_kernel)
    assert ("attention_forward" in filled, "attention_backward" in filled) == (has_kernel, False)


def longest_rows(head_dim: int, group_size: int, dtype: Any) -> dict[int, int]:
    """Returns the longest rows, in multiples of 512 tokens, that the current chip's kernel computes by each block."""
    longest = {}
    for num_tokens in range(512, 100_000, 512):
        blocking = platform_blocking(num_tokens, head_dim, dtype, group_size=group_size)
        if blocking.kernel:
            longest[blocking.block_size] = num_tokens
    return longest


def test_long_rows_use_smaller_kernel_blocks_and_finally_xla():
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v4")):
        assert longest_rows(128, 8, jnp.bfloat16) == {512: 1024, 256: 9728, 128: 13312}
        assert longest_rows(128, 8, FLOAT32) == {256: 4608, 128: 10752}
        assert longest_rows(256, 8, jnp.bfloat16) == {256: 2048, 128: 5120}
        # Rows are padded to whole blocks, so 9,000 tokens need what 9,216 need.
        assert platform_blocking(9000, 64, FLOAT32, group_size=3) == platform_blocking(9216, 64, FLOAT32, group_size=3)
        with pytest.raises(InputError, match=r"model.attention: kernel, but there is no attention kernel for tpu"):
            platform_blocking(13_312 + 512, 128, jnp.bfloat16, "kernel", group_size=8)
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v6 lite")):
        assert longest_rows(128, 8, jnp.bfloat16) == {512: 82_944}
        assert platform_blocking(4096, 128, FLOAT32, "xla", group_size=1) == (512, 1, None)
    with jax.sharding.use_abstract_mesh(mesh_of("cpu")):
        assert {platform_blocking(4096, 128, FLOAT32, i, group_size=1) for i in ("auto", "xla")} == {(64, 1, None)}


def test_decode_kernel_reads_caches_in_the_largest_blocks_that_fit():
    def sizes(kv_heads: int, dtype: Any, **changes: Any) -> list[int | None]:
        architecture = replace(EVEN, num_kv_heads=kv_heads, num_query_heads=kv_heads, head_dim=128, **changes)
        return [decode_block_size(architecture, length, dtype) for length in (12, 104, 512, 5000)]

    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v4")):
        assert sizes(8, jnp.bfloat16) == [12, 96, 512, 512]
        assert sizes(32, FLOAT32) == [12, 96, 128, 128]
        assert sizes(8, FLOAT32, attention_implementation="xla") == [None] * 4
    with jax.sharding.use_abstract_mesh(mesh_of("cpu")):
        assert sizes(8, FLOAT32) == [None] * 4


def slice_of(name: str) -> Mesh:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    return Mesh(np.array(compile_only_devices(parse_slice(name))).reshape(1, -1, 1), AXES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head_dim", "group_size", "dtype"),
    [("v4-8", 64, 3, jnp.float32), ("v5p-8", 256, 4, jnp.bfloat16), ("v5e-1", 128, 6, jnp.bfloat16)],
)
def test_tpu_attention_kernel_compiles_for_the_longest_rows_of_each_block_size(name, head_dim, group_size, dtype):
    tpu = slice_of(name)

    def on_tpu(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((tpu.size, *shape), dtype, sharding=row_sharding(tpu))

    @functools.partial(jax.grad, argnums=(0, 1, 2))
    def gradients(query, keys, values, layout):
        return jnp.sum(packed_attention(query, keys, values, layout).astype(jnp.float32))

    with jax.set_mesh(tpu):
        program = jax.jit(gradients, compiler_options=compiler_options(tpu, packed_rows=True))
        for num_tokens in longest_rows(head_dim, group_size, dtype).values():
            keys = on_tpu(1, num_tokens, head_dim)
            layout = SegmentLayout(*[on_tpu(num_tokens, dtype=jnp.int32)] * 3)
            text = program.lower(on_tpu(num_tokens, group_size, head_dim), keys, keys, layout).compile().as_text()
            assert "attention_backward" in (text or "")


ON_GPU = replace(EVEN, num_kv_heads=2, num_query_heads=4, head_dim=64)


@pytest.fixture(params=[True, False], ids=["with-triton", "without-triton"])
def with_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Makes programs for a GPU, with and without Pallas' Triton backend, and returns whether it is available."""
    if not request.param:
        for name in [name for name in sys.modules if name.startswith("app.model.kernels.gpu")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    has_triton.cache_clear()
    with jax.sharding.use_abstract_mesh(mesh_of("gpu", "NVIDIA H100 80GB HBM3")):
        yield request.param
    has_triton.cache_clear()


def num_kernels(function: Any, *shapes: Any, differentiated: int = 0) -> int:
    """Returns the number of kernels in the program of a function, or of its gradients in its first arguments."""

    def total(*arrays: Any) -> jax.Array:
        return jnp.sum(function(*arrays), dtype=jnp.float32)

    program = jax.grad(total, tuple(range(differentiated))) if differentiated else function
    # The lambda is a new function, because JAX caches the traces of known functions.
    return str(jax.make_jaxpr(lambda *x: program(*x))(*shapes)).count("pallas_call[")


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def test_gpu_programs_have_kernels_only_with_triton(with_triton: bool, caplog: pytest.LogCaptureFixture) -> None:
    # Attention in XLA does not need Triton.
    assert platform_blocking(256, 64, jnp.bfloat16, "xla", group_size=2).kernel is None
    assert decode_block_size(replace(ON_GPU, attention_implementation="xla"), 64, jnp.bfloat16) is None
    assert caplog.messages == []
    keys, ids = shape(2, 2, 256, 64), shape(2, 256, dtype=jnp.int32)
    layout = SegmentLayout(ids, ids, ids)
    packed = num_kernels(packed_attention, shape(2, 256, 4, 64), keys, keys, layout, differentiated=3)
    matrices, sizes = shape(4, 32, 48), shape(4, dtype=jnp.int32)
    products = num_kernels(grouped_product, shape(64, 32), matrices, sizes, differentiated=2)
    new, pool = shape(8, 2, 1, 64), cache_shapes(ON_GPU, 65, 64, jnp.bfloat16)[0]
    rows = shape(8, dtype=jnp.int32), shape(8, dtype=jnp.bool), shape(8, 8, dtype=jnp.int32)
    decode = functools.partial(extend_cache, block_size=decode_block_size(ON_GPU, 64, jnp.bfloat16))
    decoding = num_kernels(decode, shape(8, 1, 4, 64), new, new, pool, *rows)
    assert (packed, products, decoding) == ((3, 3, 1) if with_triton else (0, 0, 0))
    warning = f"JAX {jax.__version__} does not compile this program's GPU kernels"
    assert [message[: len(warning)] for message in caplog.messages] == [warning] * (not with_triton)


def test_gpu_attention_kernels_need_bfloat16_and_triton(with_triton: bool) -> None:
    assert platform_blocking(8192, 64, FLOAT32, group_size=1) == PARALLEL_BLOCKING
    if with_triton:
        insisted = platform_blocking(256, 64, jnp.bfloat16, "kernel", group_size=2)
        assert insisted == platform_blocking(8192, 64, jnp.bfloat16, group_size=1) == (GPU_BLOCK_SIZE, 1, "gpu")
        return
    with pytest.raises(InputError, match=r"no attention kernel for gpu devices.* JAX version with Pallas' Triton"):
        platform_blocking(256, 64, jnp.bfloat16, "kernel", group_size=2)


TRITON = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning")


def gpus_of(host: str) -> Mesh:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="JAX for CUDA is not installed: pip install -e '.[cuda]'")
    return Mesh(np.array(compile_only_devices(GPU_HOSTS[host])).reshape(1, -1, 1), AXES)


def on(mesh: Mesh, *sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, PartitionSpec()))


@TRITON
@pytest.mark.parametrize(
    ("dim", "num_rows", "dtype"), [(256, 2048, "float32"), (96, 64, "bfloat16"), (10, 7, "bfloat16")]
)
def test_grouped_matmuls_compile_for_an_h100_without_large_temporaries(dim: int, num_rows: int, dtype: Any) -> None:
    mesh = gpus_of("h100-1")

    def both(x: jax.Array, matrices: jax.Array, sizes: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(lambda x, matrices: grouped_product(x, matrices, sizes), x, matrices)
        return y, backward(dy)

    x, dy = (on(mesh, num_rows, size, dtype=dtype) for size in (dim, 2 * dim))
    matrices, sizes = on(mesh, 16, dim, 2 * dim, dtype=dtype), on(mesh, 16, dtype=jnp.int32)
    with jax.set_mesh(mesh):
        program = jax.jit(both).lower(x, matrices, sizes, dy).compile()
    text = program.as_text() or ""
    assert [text.count(f'name = "{name}"') for name in ("grouped_product", "grouped_matrix_gradient")] == [2, 1]
    if dim != 10:  # not padded to the tiles of tensor cores
        analysis: Any = program.memory_analysis()
        assert analysis.temp_size_in_bytes < 4 * num_rows * dim + 2**16


@TRITON
@pytest.mark.parametrize(
    ("head_dim", "block_size", "window", "is_int8"),
    [(64, 16, None, True), (128, 256, 100, True), (256, 64, None, False)],
)
def test_decode_kernel_compiles_for_an_h100_and_updates_caches_in_place(head_dim, block_size, window, is_int8):
    architecture = replace(EVEN, num_kv_heads=2, num_query_heads=12, head_dim=head_dim)
    mesh = gpus_of("h100-1")
    with jax.set_mesh(mesh):
        chunk = decode_block_size(architecture, block_size, jnp.bfloat16)
        assert chunk == min(block_size, GPU_BLOCK_SIZE)
        assert decode_block_size(architecture, block_size, jnp.float32) is None
        decode = jax.jit(lambda *arrays: extend_cache(*arrays, window=window, block_size=chunk), donate_argnums=3)
        new = on(mesh, 8, 2, 1, head_dim)
        pool, *_ = cache_shapes(architecture, 65, block_size, jnp.bfloat16, is_int8=is_int8)
        rows = on(mesh, 8, dtype=jnp.int32), on(mesh, 8, dtype=jnp.bool), on(mesh, 8, 8, dtype=jnp.int32)
        compiled = decode.lower(on(mesh, 8, 1, 12, head_dim), new, new, pool, *rows).compile()
    assert (compiled.as_text() or "").count('name = "attention_decode"') == 1
    # The pools are updated in place.
    analysis: Any = compiled.memory_analysis()
    pools = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(pool))
    assert analysis.alias_size_in_bytes >= pools and analysis.temp_size_in_bytes < pools
