"""Tests of mixtures of experts: the products, the routes, and the whole decoder on any mesh."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from app.model.decoder import DecoderDefinition, Params
from app.model.grouped_product import blockwise_matrix_gradient, grouped_product, tgmm_product
from tests.tiny import MIXTURE, make_mesh, random_params

FLOAT32 = jnp.dtype("float32")

SIZES = pytest.mark.parametrize(
    "sizes",
    [(5, 0, 30, 7), (0, 0, 42, 0), (11, 1, 0, 0), (0, 0, 0, 0)],
    ids=["uneven", "one-has-all", "rows-beyond", "no-rows"],
)


def dense_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiplies all rows with all matrices."""
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    return jnp.einsum("me,mi,eio->mo", jax.nn.one_hot(group, len(sizes)), x, matrices, precision="highest")


def product_inputs(sizes: tuple[int, ...]) -> tuple[jax.Array, jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, matrices = rng.normal(size=(42, 6)), rng.normal(size=(4, 6, 5))
    return jnp.asarray(x, FLOAT32), jnp.asarray(matrices, FLOAT32), jnp.array(sizes, jnp.int32)


@SIZES
def test_a_grouped_product_and_its_gradients_equal_those_of_a_one_hot_product(sizes):
    x, matrices, sizes = product_inputs(sizes)
    num_rows = int(sizes.sum())
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(42, 5)), FLOAT32)
    expected, of_dense = jax.vjp(lambda x, matrices: dense_product(x, matrices, sizes), x, matrices)
    # What lies beyond the groups is never read.
    poisoned = x.at[num_rows:].set(jnp.nan)
    y, of_ours = jax.vjp(lambda x, matrices: grouped_product(x, matrices, sizes), poisoned, matrices)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    for ours, theirs in zip(of_ours(dy.at[num_rows:].set(jnp.nan)), of_dense(dy), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@SIZES
def test_the_tpu_kernel_for_gradients_equals_the_loop_of_the_cpu(sizes):
    x, _, sizes = product_inputs(sizes)
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(42, 5)), FLOAT32)
    ours = tgmm_product(x, dy, sizes, interpret=True)
    np.testing.assert_allclose(ours, blockwise_matrix_gradient(x, dy, sizes), atol=1e-5)


def one_hot_experts(params: Params, x: jax.Array, is_token: np.ndarray) -> jax.Array:
    """Computes every expert for every token, and multiplies with weights that are zero for those not chosen."""
    logits = jnp.einsum("rtd,ed->rte", x, jax.lax.stop_gradient(params["router"]), precision="highest")
    probabilities = jax.nn.softmax(logits)
    _, chosen = jax.lax.top_k(probabilities, MIXTURE.experts_per_token)
    kept = probabilities * jax.nn.one_hot(chosen, 8).sum(axis=-2)
    weights = kept / kept.sum(axis=-1, keepdims=True) * is_token[..., None]
    gate, up = (jnp.einsum("rtd,edf->rtef", x, params[name]["kernel"], precision="highest") for name in ("gate", "up"))
    return jnp.einsum(
        "rtef,efd,rte->rtd", jax.nn.silu(gate) * up, params["down"]["kernel"], weights, precision="highest"
    )


@functools.cache
def expert_layer() -> tuple[Any, Params]:
    """Returns the graph of the experts of one layer, and their weights."""
    from app.model.experts import Experts

    definition = DecoderDefinition.create(MIXTURE)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Experts(MIXTURE, nnx.Rngs(0), stack={})))
    return graph, jax.tree.map(lambda x: x[0], random_params(definition)["blocks"]["experts"])


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 2, 2), (1, 1, 4), (2, 2, 2)])
def test_experts_on_any_mesh_and_their_gradients_equal_a_one_hot_mixture(shape):
    graph, params = expert_layer()
    rng = np.random.default_rng(3)
    x, is_token = jnp.asarray(rng.normal(size=(4, 9, 36)), FLOAT32), rng.random((4, 9)) < 0.8
    seed = jnp.asarray(rng.normal(size=x.shape), FLOAT32)
    expected, of_dense = jax.vjp(lambda params, x: one_hot_experts(params, x, is_token), params, x)

    @jax.jit
    def ours(params, x, seed):
        y, gradients = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, is_token), params, x)
        return y, gradients(seed)

    with jax.set_mesh(make_mesh(shape)):
        y, (of_params, of_x) = ours(params, x, seed)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert not np.any(y[~is_token])
    assert not np.any(of_params["router"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), (of_params, of_x), of_dense(seed))
