"""Tests that the gradient of adapters with quantized kernels equals that with dequantized kernels."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from app.model.decoder import DecoderDefinition, Params
from app.model.io.hf_weights import load_weights
from app.model.lora import LoRAConfig, combine_params
from app.update.policy_loss import make_policy_objective
from settings.schema.model import PROJECTIONS, Quantization
from tests.model.io.test_hf_weights import Held, random_file
from tests.quantized import dequantized_params
from tests.tiny import EVEN, assert_trees_close, make_mesh, one_a_row, pack_update, random_params
from tests.update.test_step import EVERYTHING, SAMPLES

pytest.importorskip("qwix", reason="Qwix is not installed: pip install -e '.[qlora]'")

ARCHITECTURE = replace(EVEN, num_layers=1)
ADAPTERS = LoRAConfig(3, 6.0, PROJECTIONS)
BATCH = pack_update(SAMPLES, one_a_row(len(SAMPLES), rows_per_micro_batch=8, num_tokens=16, num_targets=12))[0]
TEMPERATURE = jnp.float32(1.3)


def gradient(definition: DecoderDefinition, trained: Params, frozen: Params, *, remat: str) -> Params:
    objective = make_policy_objective(definition, EVERYTHING, dtype=jnp.dtype("float32"), remat=remat, logits_chunk=6)

    def loss(trained: Params, frozen: Params) -> jax.Array:
        return objective(combine_params(trained, frozen), BATCH, TEMPERATURE)[0]

    return jax.jit(jax.grad(loss))(trained, frozen)


@pytest.mark.parametrize(
    ("quantization", "remat", "mesh_shape"),
    [("int8", "minimal", (2, 2, 2)), ("int8", "block", (1, 1, 1)), ("nf4", "none", (2, 2, 2))],
    ids=str,
)
def test_the_gradient_is_that_through_kernels_in_floats(
    quantization: Quantization, remat: str, mesh_shape: tuple[int, int, int]
) -> None:
    definition = DecoderDefinition.create(ARCHITECTURE, lora=ADAPTERS, quantization=quantization)
    mesh = make_mesh(mesh_shape)
    adapters = definition.trainable(random_params(definition.unquantized))
    frozen = load_weights(definition.without_adapters, Held(random_file(ARCHITECTURE)[1]), mesh)
    floats = dequantized_params(definition.without_adapters, frozen)
    expected = gradient(definition.unquantized, adapters, floats, remat="none")
    assert all(float(jnp.abs(x).max()) > 1e-6 for x in jax.tree.leaves(expected))
    with jax.set_mesh(mesh):
        placed = jax.device_put(adapters, definition.trainable(definition.shardings(mesh)))
        found = gradient(definition, placed, frozen, remat=remat)
    assert_trees_close(found, expected, tolerance=1e-5)
    assert jax.tree.structure(combine_params(found, frozen)) == jax.tree.structure(definition.shapes)
