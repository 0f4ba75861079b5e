"""Tests that a GPU computes everything by XLA once JAX has no backend for our kernels, and that one line says so."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from app.mesh.axis_rules import AXES
from app.model.attention.cached import decode_block_size, extend_cache
from app.model.attention.packed import packed_attention, platform_blocking
from app.model.grouped_product import grouped_product
from app.model.kernels.triton_backend import has_triton
from app.model.kv_cache import cache_shapes
from app.model.segment_layout import SegmentLayout
from settings import InputError
from tests.tiny import EVEN

ARCHITECTURE = replace(EVEN, num_kv_heads=2, num_query_heads=4, head_dim=64)


@pytest.fixture(params=[True, False], ids=["with-triton", "without-triton"])
def with_triton(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Makes programs for a GPU, with and without Pallas' Triton backend; returns whether it is there."""
    if not request.param:
        for name in [name for name in sys.modules if name.startswith("app.model.kernels.gpu")]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    has_triton.cache_clear()
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1, 1, 1), AXES, (AxisType.Auto,) * 3, abstract_device=device)):
        yield request.param
    has_triton.cache_clear()


def shape(*sizes: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


def kernels_of(function: Any, *arguments: Any) -> int:
    """Returns the number of kernels in a function's program, traced anew: JAX keeps what it traced before."""
    return str(jax.make_jaxpr(lambda *x: function(*x))(*arguments)).count("pallas_call[")


def attention_gradients(query: jax.Array, keys: jax.Array, values: jax.Array, layout: SegmentLayout) -> Any:
    def total(query: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
        return jnp.sum(packed_attention(query, keys, values, layout), dtype=jnp.float32)

    return jax.grad(total, (0, 1, 2))(query, keys, values)


def product_gradients(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> Any:
    def total(x: jax.Array, matrices: jax.Array) -> jax.Array:
        y: Any = grouped_product(x, matrices, sizes)  # JAX declares no return type for custom_vjp functions.
        return jnp.sum(y, dtype=jnp.float32)

    return jax.grad(total, (0, 1))(x, matrices)


def decode(*arguments: Any) -> Any:
    return extend_cache(*arguments, block_size=decode_block_size(ARCHITECTURE, 64, jnp.bfloat16))


def test_gpu_programs_have_kernels_only_with_their_backend(with_triton: bool) -> None:
    keys, ids = shape(2, 2, 256, 64), shape(2, 256, dtype=jnp.int32)
    packed = kernels_of(attention_gradients, shape(2, 256, 4, 64), keys, keys, SegmentLayout(ids, ids, ids))
    products = kernels_of(product_gradients, shape(64, 32), shape(4, 32, 48), shape(4, dtype=jnp.int32))
    new, pool = shape(8, 2, 1, 64), cache_shapes(ARCHITECTURE, 65, 64, jnp.bfloat16)[0]
    rows = shape(8, dtype=jnp.int32), shape(8, dtype=jnp.bool), shape(8, 8, dtype=jnp.int32)
    decoding = kernels_of(decode, shape(8, 1, 4, 64), new, new, pool, *rows)
    assert (packed, products, decoding) == ((3, 3, 1) if with_triton else (0, 0, 0))


def test_one_line_says_that_xla_computes_instead(with_triton: bool, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        platform_blocking(256, 64, jnp.bfloat16, group_size=2)
        decode_block_size(ARCHITECTURE, 64, jnp.bfloat16)
        kernels_of(product_gradients, shape(64, 32), shape(4, 32, 48), shape(4, dtype=jnp.int32))
    assert len(caplog.messages) == (0 if with_triton else 1)
    if not with_triton:
        assert caplog.messages[0].startswith(f"JAX {jax.__version__} does not compile this program's kernels for GPUs")


def test_a_kernel_that_is_insisted_on_is_an_error_without_its_backend(with_triton: bool) -> None:
    if with_triton:
        assert platform_blocking(256, 64, jnp.bfloat16, "kernel", group_size=2).kernel == "gpu"
        return
    with pytest.raises(InputError, match=r"no attention kernel for gpu devices.* as long as JAX has Pallas' Triton"):
        platform_blocking(256, 64, jnp.bfloat16, "kernel", group_size=2)


def test_xla_is_never_asked_for_the_backend(with_triton: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert platform_blocking(256, 64, jnp.bfloat16, "xla", group_size=2).kernel is None
    without = replace(ARCHITECTURE, attention_implementation="xla")
    assert decode_block_size(without, 64, jnp.bfloat16) is None
    assert caplog.messages == []
