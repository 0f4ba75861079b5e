"""Tests of mixtures of experts: the products, the routes, and the whole decoder on any mesh."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from app.mesh.axis_rules import AXES
from app.mesh.chips import parse_slice
from app.mesh.devices import compile_only_devices
from app.model.decoder import DecoderDefinition, Params
from app.model.experts import Experts, Places, choose_experts, combine, dispatch
from app.model.grouped_product import blockwise_matrix_gradient, grouped_product, tgmm_product
from app.model.kernels import gpu_grouped_product
from scripts.bench.hlo_collectives import program_collectives
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
    # What lies beyond the groups affects nothing else.
    poisoned = x.at[num_rows:].set(jnp.nan)
    y, of_ours = jax.vjp(lambda x, matrices: grouped_product(x, matrices, sizes), poisoned, matrices)
    np.testing.assert_allclose(y[:num_rows], expected[:num_rows], atol=1e-5)
    (dx, of_matrices), theirs = of_ours(dy.at[num_rows:].set(jnp.nan)), of_dense(dy)
    np.testing.assert_allclose(dx[:num_rows], theirs[0][:num_rows], atol=1e-5)
    np.testing.assert_allclose(of_matrices, theirs[1], atol=1e-5)


@SIZES
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "gradient",
    [tgmm_product, gpu_grouped_product.matrix_gradient],
    ids=["tpu", "gpu"],
)
def test_the_kernels_for_gradients_equal_the_loop_of_the_cpu(gradient, sizes):
    x, _, sizes = product_inputs(sizes)
    num_rows = int(sizes.sum())
    dy = jnp.asarray(np.random.default_rng(1).normal(size=(42, 5)), FLOAT32)
    ours = gradient(x.at[num_rows:].set(jnp.nan), dy.at[num_rows:].set(jnp.nan), sizes)
    np.testing.assert_allclose(ours, blockwise_matrix_gradient(x, dy, sizes), atol=1e-5)


@SIZES
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("contracted", [1, 2])
def test_the_gpu_kernel_for_products_equals_a_one_hot_product(contracted, sizes):
    x, matrices, sizes = product_inputs(sizes)
    num_rows = int(sizes.sum())
    expected = dense_product(x, matrices, sizes)
    matrices = matrices if contracted == 1 else matrices.swapaxes(1, 2)
    poisoned = x.at[num_rows:].set(jnp.nan)
    y = gpu_grouped_product.rows_product(poisoned, matrices, sizes, contracted=contracted)
    np.testing.assert_allclose(y[:num_rows], expected[:num_rows], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FLOAT32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize(("num_experts", "inner", "outer"), [(32, 2048, 768), (2, 4096, 14_336)])
def test_products_compile_for_a_tpu_and_are_not_expanded(num_experts, inner, outer, dtype):
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    tpu, num_rows = Mesh(np.array(compile_only_devices(parse_slice("v5e-1"))).reshape(1, 1, 1), AXES), 4096

    def shape(*sizes: int, dtype: Any = dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(tpu, PartitionSpec()))

    def both(x: jax.Array, matrices: jax.Array, sizes: jax.Array, dy: jax.Array) -> Any:
        y, backward = jax.vjp(lambda x, matrices: grouped_product(x, matrices, sizes), x, matrices)
        return y, backward(dy)

    arrays = shape(num_rows, inner), shape(num_experts, inner, outer), shape(num_experts, dtype=jnp.int32)
    # As a run of this dtype does; another test of the process may have left the other precision behind.
    precision = "highest" if dtype == FLOAT32 else "default"
    with jax.set_mesh(tpu), jax.default_matmul_precision(precision):
        cost: Any = jax.jit(both).lower(*arrays, shape(num_rows, outer)).compile().cost_analysis()
    assert cost["flops"] == pytest.approx(3 * 2 * num_rows * inner * outer, rel=0.1)


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
        y, gradients = jax.vjp(lambda params, x: nnx.merge(graph, params)(x, is_token)[0], params, x)
        return y, gradients(seed)

    with jax.set_mesh(make_mesh(shape)):
        y, (of_params, of_x) = ours(params, x, seed)
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert not np.any(y[~is_token])
    assert not np.any(of_params["router"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), (of_params, of_x), of_dense(seed))


def test_a_router_gives_probabilities_of_all_experts_or_of_the_chosen_alone():
    x, router = jnp.ones((1, 1)), jnp.log(jnp.array([[1.0], [4.0], [2.0], [1.0]]))
    two = replace(MIXTURE, experts_per_token=2)
    probabilities, chosen, _ = choose_experts(replace(two, normalized_routing=False), x, router)
    np.testing.assert_array_equal(chosen, [[1, 2]])
    np.testing.assert_allclose(probabilities, [[0.5, 0.25]], rtol=1e-6)
    probabilities, *_ = choose_experts(two, x, router)
    np.testing.assert_allclose(probabilities, [[2 / 3, 1 / 3]], rtol=1e-6)


def test_copies_go_out_in_order_and_come_back_as_sums_and_each_is_the_gradient_of_the_other():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)), FLOAT32)
    order = jnp.asarray(np.random.default_rng(1).permutation(10))
    places = Places(order, jnp.argsort(order), jnp.int32(10))
    sent, of_dispatch = jax.vjp(lambda x: dispatch(x, 2, places), x)
    y = jnp.asarray(sent)
    np.testing.assert_array_equal(y, x[order // 2])
    total, of_combine = jax.vjp(lambda y: combine(y, 2, places), y)
    np.testing.assert_allclose(np.asarray(total), 2 * x, rtol=1e-6)
    np.testing.assert_array_equal(of_combine(x)[0], y)
    np.testing.assert_allclose(of_dispatch(y)[0], 2 * x, rtol=1e-6)
    # A copy without an expert here does not count, whatever it holds.
    total = combine(y.at[9].set(jnp.nan), 2, places._replace(num_used=jnp.int32(9)))
    np.testing.assert_allclose(np.asarray(total), 2 * x - jnp.zeros_like(x).at[order[9] // 2].set(y[9]), rtol=1e-6)


def test_no_step_of_a_pass_or_its_gradients_is_a_scatter():
    graph, params = expert_layer()
    x, is_token = jnp.ones((2, 6, 36)), np.ones((2, 6), bool)
    program = jax.make_jaxpr(jax.grad(lambda *args: nnx.merge(graph, args[0])(args[1], is_token)[0].sum(), (0, 1)))(
        params, x
    )
    assert "scatter" not in str(program)


def test_sums_over_tp_are_all_that_devices_send_each_other():
    graph, params = expert_layer()
    x, is_token = jnp.ones((4, 9, 36)), np.ones((4, 9), bool)
    program = jax.jit(jax.grad(lambda *args: jnp.vdot(nnx.merge(graph, args[0])(args[1], is_token)[0], x), (0, 1)))
    with jax.set_mesh(make_mesh((1, 1, 4))):
        moved = program_collectives(program.lower(params, x).compile())
    assert {one.collective.kind for one in moved} == {"all-reduce"}


def test_what_padding_holds_changes_no_bit_of_a_token():
    graph, params = expert_layer()
    rng = np.random.default_rng(5)
    x, is_token = rng.normal(size=(2, 9, 36)).astype(np.float32), rng.random((2, 9)) < 0.6
    mix = jax.jit(lambda x: nnx.merge(graph, params)(x, is_token)[0])
    y, other = mix(x), mix(np.where(is_token[..., None], x, np.float32(1e4)))
    np.testing.assert_array_equal(y, other)
    assert not np.any(y[~is_token]) and np.all(np.any(y[is_token], axis=-1))
