"""Tests mixtures of experts: their matmuls, a layer on any mesh, and routes that are recorded and replayed."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from app.batching.token_batch import pack_tokens
from app.mesh.placement import to_global
from app.model.architecture import RouteShape
from app.model.decoder import DecoderDefinition, Params
from app.model.experts import UNRECORDED, Experts, choose_experts, pack_routes, unpack_routes
from app.model.grouped_product import blockwise_matrix_gradient, grouped_product, tgmm_product
from app.model.kernels import gpu_grouped_product
from app.records.sample import Sample
from app.score.scorer import Scorer
from app.update.policy_loss import make_policy_objective
from scripts.bench.hlo_collectives import program_collectives
from tests import tiny

FLOAT32 = jnp.dtype("float32")

SIZES = [(5, 0, 30, 7), (0, 0, 42, 0), (11, 1, 0, 0), (0, 0, 0, 0)]
"""Rows of each group: uneven, all in one, with rows beyond the groups, and none."""


@jax.jit
def dense_product(x: jax.Array, matrices: jax.Array, sizes: jax.Array) -> jax.Array:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(len(x)), side="right")
    return jnp.einsum("me,mi,eio->mo", jax.nn.one_hot(group, len(sizes)), x, matrices, precision="highest")


def product_inputs() -> Iterator[tuple[int, np.ndarray, np.ndarray, np.ndarray, np.ndarray]]:
    """Yields numbers of rows in groups, rows, matrices, sizes of groups, and weights of the results in a loss."""
    rng = np.random.default_rng(0)
    x, matrices, dy = (rng.normal(size=size).astype(np.float32) for size in ((42, 6), (4, 6, 5), (42, 5)))
    for sizes in SIZES:
        yield sum(sizes), x, matrices, np.array(sizes, np.int32), dy


def poisoned(x: np.ndarray, num_rows: int) -> np.ndarray:
    """Returns the rows with NaN in all rows beyond the groups."""
    return np.where(np.arange(len(x))[:, None] < num_rows, x, np.float32(np.nan))


def test_grouped_matmuls_and_gradients_equal_one_hot_matmuls():
    def with_gradients(product: Callable[..., jax.Array], x, matrices, sizes, dy):
        y, pull = jax.vjp(lambda x, matrices: product(x, matrices, sizes), x, matrices)
        return y, *pull(dy)

    ours, dense = (jax.jit(functools.partial(with_gradients, product)) for product in (grouped_product, dense_product))
    for num_rows, x, matrices, sizes, dy in product_inputs():
        y, dx, of_matrices = ours(poisoned(x, num_rows), matrices, sizes, poisoned(dy, num_rows))
        expected = dense(x, matrices, sizes, dy)
        np.testing.assert_allclose(y[:num_rows], expected[0][:num_rows], atol=1e-5)
        np.testing.assert_allclose(dx[:num_rows], expected[1][:num_rows], atol=1e-5)
        np.testing.assert_allclose(of_matrices, expected[2], atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("gradient", [tgmm_product, gpu_grouped_product.matrix_gradient], ids=["tpu", "gpu"])
def test_expert_gradient_kernels_equal_the_cpu_loop(gradient):
    ours, expected = jax.jit(gradient), jax.jit(blockwise_matrix_gradient)
    for num_rows, x, _, sizes, dy in product_inputs():
        found = ours(poisoned(x, num_rows), poisoned(dy, num_rows), sizes)
        np.testing.assert_allclose(found, expected(x, dy, sizes), atol=1e-5)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("contracted", [1, 2])
def test_the_gpu_kernel_for_grouped_matmuls_equals_a_one_hot_matmul(contracted):
    product = jax.jit(functools.partial(gpu_grouped_product.rows_product, contracted=contracted))
    for num_rows, x, matrices, sizes, _ in product_inputs():
        expected = dense_product(x, matrices, sizes)
        y = product(poisoned(x, num_rows), matrices if contracted == 1 else matrices.swapaxes(1, 2), sizes)
        np.testing.assert_allclose(y[:num_rows], expected[:num_rows], atol=1e-5)


def one_hot_experts(params: Params, x: jax.Array, is_token: jax.Array) -> jax.Array:
    """Computes every expert for every token, and multiplies with weights that are zero for those not chosen."""
    logits = jnp.einsum("rtd,ed->rte", x, jax.lax.stop_gradient(params["router"]), precision="highest")
    probabilities = jax.nn.softmax(logits)
    _, chosen = jax.lax.top_k(probabilities, tiny.MIXTURE.experts_per_token)
    kept = probabilities * jax.nn.one_hot(chosen, 8).sum(axis=-2)
    weights = kept / kept.sum(axis=-1, keepdims=True) * is_token[..., None]
    gate, up = (jnp.einsum("rtd,edf->rtef", x, params[name]["kernel"], precision="highest") for name in ("gate", "up"))
    return jnp.einsum(
        "rtef,efd,rte->rtd", jax.nn.silu(gate) * up, params["down"]["kernel"], weights, precision="highest"
    )


@pytest.mark.parametrize("shape", [(1, 1, 4), (2, 2, 2)])
def test_experts_on_any_mesh_equal_a_one_hot_mixture(shape):
    definition = DecoderDefinition.create(tiny.MIXTURE)
    graph, _ = nnx.split(nnx.eval_shape(lambda: Experts(tiny.MIXTURE, nnx.Rngs(0), stack={})))
    params = jax.tree.map(lambda x: np.asarray(x)[0], tiny.random_params(definition)["blocks"]["experts"])
    rng = np.random.default_rng(3)
    x, seed = (rng.normal(size=(4, 9, 36)).astype(np.float32) for _ in range(2))
    is_token = jnp.asarray(rng.random((4, 9)) < 0.8)

    def with_gradients(experts: Callable[..., jax.Array], params, x, seed):
        y, pull = jax.vjp(experts, params, x)
        return y, pull(seed)

    dense = jax.jit(functools.partial(with_gradients, functools.partial(one_hot_experts, is_token=is_token)))
    ours = jax.jit(functools.partial(with_gradients, lambda params, x: nnx.merge(graph, params)(x, is_token)[0]))
    expected, of_dense = dense(params, x, seed)
    # Values at padding have no effect.
    arrays = params, np.where(is_token[..., None], x, np.float32(1e4)), seed
    with jax.set_mesh(tiny.make_mesh(shape)):
        y, (of_params, of_x) = ours(*arrays)
        # No operation adds in a nondeterministic order, and devices communicate only to sum over tp.
        assert "scatter" not in str(jax.make_jaxpr(ours)(*arrays))
        if shape == (1, 1, 4):
            moved = program_collectives(ours.lower(*arrays).compile())
            assert {one.collective.kind for one in moved} == {"all-reduce"}
    np.testing.assert_allclose(y, expected, atol=1e-5)
    assert not np.any(y[~is_token]) and np.all(np.any(y[is_token], axis=-1))
    assert not np.any(of_params["router"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), (of_params, of_x), of_dense)


DEFINITION = DecoderDefinition.create(tiny.MIXTURE)
SHAPE = RouteShape(tiny.MIXTURE.num_layers, tiny.MIXTURE.experts_per_token)
SAMPLES = tiny.random_samples(3, 3, vocab_size=tiny.MIXTURE.vocab_size)


@functools.cache
def params() -> Params:
    return tiny.random_params(DEFINITION)


@functools.cache
def scorer(*, replays: bool) -> Scorer:
    return Scorer(DEFINITION, tiny.make_mesh(), dtype=FLOAT32, logits_chunk=5, replays_routes=replays)


def scores(samples: Sequence[Sample], *, replays: bool = True) -> np.ndarray:
    plan = tiny.packed_plan(samples, quota=64, row_length=32, share_prompts=True)
    return np.concatenate(scorer(replays=replays).per_token(params(), samples, plan, temperature=1.0))


@functools.cache
def with_own_routes() -> list[Sample]:
    """Returns the samples with the experts that the routers choose for them, each alone in a row."""
    how = {"dtype": FLOAT32, "remat": "none"}
    find = jax.jit(lambda params, *rows: DEFINITION.bind(params).hidden_and_routes(*rows, **how)[1])
    plan, found = tiny.one_a_row(len(SAMPLES), rows_per_micro_batch=1, num_tokens=16, num_targets=9), []
    for sample, micro_batch in zip(SAMPLES, plan.micro_batches, strict=True):
        rows = pack_tokens(SAMPLES, micro_batch)
        live = np.asarray(find(params(), rows.token_ids, rows.layout))
        length = len(sample.prompt.token_ids) + len(sample.completion_ids)
        found.append(replace(sample, routes=np.moveaxis(live[:, 0, :length], 0, 1).astype(np.uint8)))
    return found


def rotated(samples: Sequence[Sample]) -> list[Sample]:
    """Returns samples whose recorded experts are each replaced by the next one."""
    return [replace(s, routes=((s.routes + 1) % 8).astype(np.uint8)) for s in samples if s.routes is not None]


@pytest.mark.parametrize("shape", [RouteShape(2, 3), RouteShape(4, 2), RouteShape(1, 1)])
def test_unpacking_restores_packed_expert_routes(shape):
    chosen = np.random.default_rng(0).integers(0, 256, (shape.num_layers, 4, 5, shape.experts_per_token))
    words = np.asarray(pack_routes(jnp.asarray(chosen, jnp.int32)))
    assert words.shape == (4, 5, shape.num_words)
    np.testing.assert_array_equal(unpack_routes(words, shape), np.moveaxis(chosen, 0, 2))


def test_recorded_experts_are_weighted_by_the_current_routers_probabilities():
    x, router = jnp.ones((3, 1)), jnp.log(jnp.array([[1.0], [4.0], [2.0], [1.0]]))
    recorded = jnp.array([[3, 0], [UNRECORDED, UNRECORDED], [2, 1]], jnp.uint8)
    two = replace(tiny.MIXTURE, experts_per_token=2, normalized_routing=False)
    probabilities, chosen, live = choose_experts(two, x, router, recorded)
    np.testing.assert_array_equal(chosen, [[3, 0], [1, 2], [2, 1]])
    np.testing.assert_array_equal(live, [[1, 2]] * 3)
    # All probabilities are computed; those of only two experts would sum to 1.
    np.testing.assert_allclose(probabilities, [[1 / 8, 1 / 8], [1 / 2, 1 / 4], [1 / 4, 1 / 2]], rtol=1e-6)
    normalized, *_ = choose_experts(replace(two, normalized_routing=True), x, router, recorded)
    np.testing.assert_allclose(normalized, [[1 / 2, 1 / 2], [2 / 3, 1 / 3], [1 / 3, 2 / 3]], rtol=1e-6)

    def of_third(router: jax.Array) -> jax.Array:
        return choose_experts(two, x, router, recorded)[0][0, 0]

    # An expert that is not chosen also has a gradient, as in the forward pass of the sampler.
    np.testing.assert_allclose(jax.grad(of_third)(router)[:, 0], [-1 / 64, -4 / 64, -2 / 64, 7 / 64], rtol=1e-5)


def test_scoring_replays_recorded_routes():
    live = scores(SAMPLES, replays=False)
    np.testing.assert_array_equal(scores(with_own_routes()), live)
    np.testing.assert_array_equal(scores(SAMPLES), live)
    assert np.abs(scores(rotated(with_own_routes())) - live).max() > 0.05


@pytest.mark.parametrize("num_without", [0, 1])
def test_a_shared_prompt_gets_the_routes_of_its_first_sample_with_recorded_routes(num_without):
    samples = rotated(with_own_routes())[:3]
    (micro_batch,) = tiny.packed_plan(samples, quota=64, row_length=64, share_prompts=True).micro_batches
    [segment] = [segment for row in micro_batch.rows for segment in row]
    for number in segment[:num_without]:
        samples[number] = replace(samples[number], routes=None)
    rows = pack_tokens(samples, micro_batch, SHAPE)
    assert rows.routes is not None and rows.routes.dtype == np.uint8
    at = length = len(samples[0].prompt.token_ids)
    first = samples[segment[num_without]].routes
    assert first is not None
    np.testing.assert_array_equal(rows.routes[0, :length], first[:length])
    for number in segment:
        routes, end = samples[number].routes, at + len(samples[number].completion_ids)
        expected = UNRECORDED if routes is None else routes[length:]
        np.testing.assert_array_equal(rows.routes[0, at:end], np.broadcast_to(expected, rows.routes[0, at:end].shape))
        at = end
    assert np.all(rows.routes[0, at:] == UNRECORDED)


def test_an_update_replays_recorded_routes():
    """mesh/test_equal_on_any_mesh.py replays on eight devices."""
    objective = make_policy_objective(DEFINITION, tiny.PLAIN_LOSS, dtype=FLOAT32, remat="none", logits_chunk=5)
    run = jax.jit(jax.value_and_grad(objective, has_aux=True))
    plan = tiny.one_a_row(len(SAMPLES), rows_per_micro_batch=12, num_tokens=16, num_targets=9)

    def update(samples: Sequence[Sample], *, replays: bool = True) -> Any:
        (batch,) = tiny.pack_update(samples, plan)
        if replays:
            batch = replace(batch, tokens=pack_tokens(samples, plan.micro_batches[0], SHAPE))
        with jax.set_mesh(mesh := tiny.make_mesh()):
            (_, stats), gradient = run(params(), to_global(mesh, batch), jnp.float32(1))
        return stats, gradient

    stats, live = update(SAMPLES, replays=False)
    own, gradient = update(with_own_routes())
    jax.tree.map(np.testing.assert_array_equal, gradient, live)
    assert "rollout/route_difference" not in stats.metrics() and own.metrics()["rollout/route_difference"] == 0
    np.testing.assert_array_equal(own.routes.load, stats.routes.load)
    foreign, expected = update(rotated(with_own_routes()))
    assert foreign.metrics()["rollout/route_difference"] > 0.9
    # The router stays frozen.
    assert not np.any(expected["blocks"]["experts"]["router"])
