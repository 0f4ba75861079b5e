"""Tests that `model.attention` decides, on a TPU that need not be there, which programs contain the kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from app.mesh.axis_rules import AXES
from app.mesh.chips import parse_slice
from app.mesh.compiler_options import compiler_options
from app.mesh.devices import compile_only_devices
from app.mesh.placement import row_sharding
from app.model.attention.cached import cache_block_size, decode_block_size, extend_cache
from app.model.attention.packed import packed_attention, platform_blocking
from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.kv_cache import abstract_cache, cache_shapes
from app.model.prefill_and_decode import prefill
from app.model.segment_layout import SegmentLayout, single_segment_layout
from settings import InputError
from tests.tiny import EVEN

FLOAT32 = jnp.dtype("float32")
LONG, SHORT = 200, 20
"""Tokens of a row of several of XLA's blocks, and of one of a single block."""


def mesh_of(platform: str, kind: str = "") -> Any:
    return AbstractMesh((1, 1, 1), AXES, (AxisType.Auto,) * 3, abstract_device=AbstractDevice(kind, None, platform))


@functools.cache
def traced(implementation, platform: str, num_tokens: int) -> tuple[str, str]:
    """Returns the program of a forward and backward pass, and that of a prefill."""
    definition = DecoderDefinition.create(replace(EVEN, attention_implementation=implementation))
    tokens = jax.ShapeDtypeStruct((2, num_tokens), jnp.int32)

    def loss(params, tokens):
        layout = single_segment_layout(jnp.ones(tokens.shape, bool))
        return jnp.sum(definition.bind(params).hidden(tokens, layout, dtype=FLOAT32))

    def fill(weights, tokens):
        return prefill(definition, weights, tokens, jnp.array([num_tokens, 3]))

    with jax.sharding.use_abstract_mesh(mesh_of(platform)):
        weights = abstract_decode_weights(definition, mesh_of(platform), FLOAT32)
        return str(jax.make_jaxpr(jax.grad(loss))(definition.shapes, tokens)), str(
            jax.make_jaxpr(fill)(weights, tokens)
        )


@pytest.mark.parametrize("num_tokens", [LONG, SHORT])
@pytest.mark.parametrize(
    ("implementation", "platform", "has_kernel"),
    [
        *(("auto", "tpu", True), ("kernel", "tpu", True), ("xla", "tpu", False)),
        *(("auto", "cpu", False), ("xla", "cpu", False)),
    ],
)
def test_the_kernels_are_in_every_program_of_a_platform_that_has_them(implementation, platform, has_kernel, num_tokens):
    gradients, filled = traced(implementation, platform, num_tokens)
    assert ("attention_forward" in gradients, "attention_backward" in gradients) == (has_kernel, has_kernel)
    assert ("attention_forward" in filled, "attention_backward" in filled) == (has_kernel, False)


def test_xla_computes_larger_blocks_on_a_tpu_than_on_a_cpu():
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v5 lite")):
        assert platform_blocking(4096, 128, FLOAT32, "xla", group_size=1) == (512, 1, None)
        assert platform_blocking(4096, 128, FLOAT32, "auto", group_size=1) == (512, 1, "tpu")
    with jax.sharding.use_abstract_mesh(mesh_of("cpu")):
        assert (
            platform_blocking(4096, 128, FLOAT32, "auto", group_size=1)
            == platform_blocking(4096, 128, FLOAT32, "xla", group_size=1)
            == (64, 1, None)
        )


def longest_rows(head_dim: int, group_size: int, dtype: Any) -> dict[int, int]:
    """Returns the longest rows, in multiples of 512 tokens, that the current chip's kernel computes by each block."""
    longest = {}
    for num_tokens in range(512, 100_000, 512):
        blocking = platform_blocking(num_tokens, head_dim, dtype, group_size=group_size)
        if blocking.kernel:
            longest[blocking.block_size] = num_tokens
    return longest


def test_longer_rows_and_larger_heads_take_smaller_blocks_and_then_xla_unless_the_kernel_is_insisted_on():
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v4")):
        assert longest_rows(128, 8, jnp.bfloat16) == {512: 1024, 256: 9728, 128: 13312}
        assert longest_rows(128, 8, FLOAT32) == {256: 4608, 128: 10752}
        assert longest_rows(256, 8, jnp.bfloat16) == {256: 2048, 128: 5120}
        assert platform_blocking(13_312 + 512, 128, jnp.bfloat16, group_size=8).kernel is None
        # Rows are padded to whole blocks, so 9,000 tokens need what 9,216 need.
        assert platform_blocking(9000, 64, FLOAT32, group_size=3) == platform_blocking(9216, 64, FLOAT32, group_size=3)
        with pytest.raises(InputError, match=r"model.attention: kernel, but there is no attention kernel for tpu"):
            platform_blocking(13_312 + 512, 128, jnp.bfloat16, "kernel", group_size=8)
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v6 lite")):
        assert longest_rows(128, 8, jnp.bfloat16) == {512: 82_944}


def test_caches_are_read_in_the_largest_blocks_that_fit_the_chip():
    def sizes(kv_heads: int, dtype: Any, **changes: Any) -> list[int | None]:
        architecture = replace(EVEN, num_kv_heads=kv_heads, num_query_heads=kv_heads, head_dim=128, **changes)
        return [decode_block_size(architecture, length, dtype) for length in (12, 104, 512, 5000)]

    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v4")):
        assert sizes(8, jnp.bfloat16) == [12, 96, 512, 512]
        assert sizes(32, FLOAT32) == [12, 96, 128, 128]
        assert sizes(8, FLOAT32, attention_implementation="xla") == [None] * 4
    with jax.sharding.use_abstract_mesh(mesh_of("cpu")):
        assert sizes(8, FLOAT32) == [None] * 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "head_dim", "group_size", "dtype"),
    [
        *(("v4-8", 128, 8, jnp.bfloat16), ("v4-8", 64, 3, jnp.float32), ("v5p-8", 256, 4, jnp.bfloat16)),
        ("v5e-1", 128, 6, jnp.bfloat16),
    ],
)
def test_the_kernel_compiles_with_the_longest_rows_of_each_block(name, head_dim, group_size, dtype):
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    tpu = Mesh(np.array(compile_only_devices(parse_slice(name))).reshape(1, -1, 1), AXES)

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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("v4-8", FLOAT32), ("v5e-1", jnp.bfloat16)])
@pytest.mark.parametrize("is_int8", [False, True], ids=["float", "int8"])
def test_the_decode_kernel_compiles_with_the_blocks_of_many_heads(name, dtype, is_int8):
    """Rows have blocks of a pool, for up to 8,192 tokens."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    tpu = Mesh(np.array(compile_only_devices(parse_slice(name))).reshape(1, -1, 1), AXES)
    architecture = replace(EVEN, num_kv_heads=32, num_query_heads=32, head_dim=128)

    def on_tpu(*shape: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((4 * tpu.size, *shape), dtype, sharding=row_sharding(tpu))

    with jax.set_mesh(tpu):
        length = cache_block_size(architecture, 8192, dtype, is_large=True)
        new, block_size = on_tpu(32, 1, 128), decode_block_size(architecture, length, dtype)
        cache = abstract_cache(cache_shapes(architecture, 4 * tpu.size, length, dtype, is_int8=is_int8), tpu)[0]
        decode = jax.jit(functools.partial(extend_cache, block_size=block_size), donate_argnums=3)
        arguments = on_tpu(1, 32, 128), new, new, cache, on_tpu(dtype=jnp.int32), on_tpu(dtype=jnp.bool)
        program = decode.lower(*arguments, tables=on_tpu(8192 // length, dtype=jnp.int32)).compile()
    assert "attention_decode" in (program.as_text() or "")
