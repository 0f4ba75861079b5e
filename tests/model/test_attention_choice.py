"""Tests that `model.attention` decides, on a TPU that need not be there, which programs contain the kernels."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from app.mesh.axis_rules import AXES
from app.model.attention import platform_blocking
from app.model.decode_weights import abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.prefill_and_decode import prefill
from app.model.segment_layout import single_segment_layout
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
        assert platform_blocking(4096, 128, FLOAT32, "xla") == (512, 1, None)
        assert platform_blocking(4096, 128, FLOAT32, "auto") == (512, 1, "tpu")
    with jax.sharding.use_abstract_mesh(mesh_of("cpu")):
        assert (
            platform_blocking(4096, 128, FLOAT32, "auto")
            == platform_blocking(4096, 128, FLOAT32, "xla")
            == (64, 1, None)
        )


def test_rows_too_long_for_a_chip_take_xla_unless_the_kernel_is_insisted_on():
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v4")):
        assert platform_blocking(8192, 64, FLOAT32) == (256, 1, "tpu")
        assert platform_blocking(8193, 64, FLOAT32).kernel is None
        assert platform_blocking(4097, 256, FLOAT32).kernel is None
        with pytest.raises(InputError, match=r"model.attention: kernel, but there is no attention kernel for tpu"):
            platform_blocking(8193, 64, FLOAT32, "kernel")
    with jax.sharding.use_abstract_mesh(mesh_of("tpu", "TPU v6 lite")):
        assert platform_blocking(65_536, 128, FLOAT32).kernel == "tpu"
        assert platform_blocking(65_537, 128, FLOAT32).kernel is None
