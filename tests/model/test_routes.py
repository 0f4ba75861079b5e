"""Tests of routes: their bytes, and passes that replay them, on any mesh."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.batching.token_batch import pack_tokens
from app.mesh.placement import to_global
from app.model.architecture import RouteShape
from app.model.decoder import DecoderDefinition, Params
from app.model.experts import UNRECORDED, choose_experts, pack_routes, unpack_routes
from app.model.segment_layout import SegmentLayout
from app.records.sample import Sample
from app.score.scorer import Scorer
from app.update.policy_loss import make_policy_objective
from tests.tiny import (
    MIXTURE,
    PLAIN_LOSS,
    assert_trees_close,
    make_mesh,
    one_a_row,
    pack_update,
    packed_plan,
    random_params,
    random_samples,
)

FLOAT32 = jnp.dtype("float32")
DEFINITION = DecoderDefinition.create(MIXTURE)
SHAPE = RouteShape(MIXTURE.num_layers, MIXTURE.experts_per_token)
SAMPLES = random_samples(3, 3, vocab_size=MIXTURE.vocab_size)


@functools.cache
def params() -> Params:
    return random_params(DEFINITION)


@functools.cache
def scorer(shape: tuple[int, int, int] = (1, 1, 1), *, replays: bool = True) -> Scorer:
    return Scorer(DEFINITION, make_mesh(shape), dtype=FLOAT32, logits_chunk=5, replays_routes=replays)


def scores(samples: Sequence[Sample], *, share: bool = True, **how: Any) -> np.ndarray:
    plan = packed_plan(samples, quota=64, row_length=32, share_prompts=share)
    return np.concatenate(scorer(**how).per_token(params(), samples, plan, temperature=1.0))


@functools.cache
def with_own_routes() -> list[Sample]:
    """Returns the samples with the experts that the routers choose for them, each alone in a row."""
    how = {"dtype": FLOAT32, "remat": "none"}
    find = jax.jit(lambda params, *rows: DEFINITION.bind(params).hidden_and_routes(*rows, **how)[1])
    plan, found = one_a_row(len(SAMPLES), rows_per_micro_batch=1, num_tokens=16, num_targets=9), []
    for sample, micro_batch in zip(SAMPLES, plan.micro_batches, strict=True):
        rows = pack_tokens(SAMPLES, micro_batch)
        layout = SegmentLayout(rows.segment_ids, rows.branch_ids, rows.positions)
        live = np.asarray(find(params(), rows.token_ids, layout))
        length = len(sample.prompt.token_ids) + len(sample.completion_ids)
        found.append(replace(sample, routes=np.moveaxis(live[:, 0, :length], 0, 1).astype(np.uint8)))
    return found


def rotated(samples: Sequence[Sample]) -> list[Sample]:
    """Returns samples whose tokens pass through the next expert of each."""
    return [replace(s, routes=((s.routes + 1) % 8).astype(np.uint8)) for s in samples if s.routes is not None]


@pytest.mark.parametrize("shape", [RouteShape(2, 3), RouteShape(4, 2), RouteShape(1, 1), RouteShape(3, 3)])
def test_routes_come_back_from_their_words_for_any_number_of_bytes(shape):
    chosen = np.random.default_rng(0).integers(0, 256, (shape.num_layers, 4, 5, shape.experts_per_token))
    words = np.asarray(pack_routes(jnp.asarray(chosen, jnp.int32)))
    assert words.shape == (4, 5, shape.num_words)
    np.testing.assert_array_equal(unpack_routes(words, shape), np.moveaxis(chosen, 0, 2))


def test_recorded_experts_get_the_probabilities_that_the_router_gives_them_now():
    x, router = jnp.ones((3, 1)), jnp.log(jnp.array([[1.0], [4.0], [2.0], [1.0]]))
    recorded = jnp.array([[3, 0], [UNRECORDED, UNRECORDED], [2, 1]], jnp.uint8)
    two = replace(MIXTURE, experts_per_token=2, normalized_routing=False)
    probabilities, chosen, live = choose_experts(two, x, router, recorded)
    np.testing.assert_array_equal(chosen, [[3, 0], [1, 2], [2, 1]])
    np.testing.assert_array_equal(live, [[1, 2]] * 3)
    # All of the probabilities are computed: those of two experts alone would add up to 1.
    np.testing.assert_allclose(probabilities, [[1 / 8, 1 / 8], [1 / 2, 1 / 4], [1 / 4, 1 / 2]], rtol=1e-6)
    normalized, *_ = choose_experts(replace(two, normalized_routing=True), x, router, recorded)
    np.testing.assert_allclose(normalized, [[1 / 2, 1 / 2], [2 / 3, 1 / 3], [1 / 3, 2 / 3]], rtol=1e-6)

    def of_third(router: jax.Array) -> jax.Array:
        return choose_experts(two, x, router, recorded)[0][0, 0]

    # An expert that is not chosen has a gradient, as in the pass that the sampler took.
    np.testing.assert_allclose(jax.grad(of_third)(router)[:, 0], [-1 / 64, -4 / 64, -2 / 64, 7 / 64], rtol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_a_pass_that_replays_its_own_routes_gives_the_same_bits_and_so_does_one_without_routes(share):
    live = scores(SAMPLES, replays=False, share=share)
    np.testing.assert_array_equal(scores(with_own_routes(), share=share), live)
    np.testing.assert_array_equal(scores(SAMPLES, share=share), live)


def test_foreign_routes_change_every_sample_on_every_mesh_alike():
    foreign = rotated(with_own_routes())
    expected = scores(foreign)
    assert np.abs(expected - scores(SAMPLES)).max() > 0.05
    plan = one_a_row(len(foreign), rows_per_micro_batch=12, num_tokens=16, num_targets=9)
    for shape in ((1, 1, 2), (2, 2, 2)):
        ours = scorer(shape).per_token(params(), foreign, plan, temperature=1.0)
        np.testing.assert_allclose(np.concatenate(ours), expected, atol=2e-5)


@pytest.mark.parametrize("num_without", [0, 1])
def test_a_shared_prompt_has_the_routes_of_its_first_sample_with_any_and_each_completion_its_own(num_without):
    samples = rotated(with_own_routes())[:3]
    (micro_batch,) = packed_plan(samples, quota=64, row_length=64, share_prompts=True).micro_batches
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


@functools.cache
def gradient_on(shape: tuple[int, int, int]) -> Any:
    objective = make_policy_objective(DEFINITION, PLAIN_LOSS, dtype=FLOAT32, remat="block", logits_chunk=5)
    return jax.jit(jax.value_and_grad(objective, has_aux=True)), make_mesh(shape)


def update_of(samples: Sequence[Sample], shape: tuple[int, int, int], *, replays: bool = True) -> Any:
    plan = one_a_row(len(samples), rows_per_micro_batch=12, num_tokens=16, num_targets=9)
    (batch,) = pack_update(samples, plan)
    if replays:
        batch = replace(batch, tokens=pack_tokens(samples, plan.micro_batches[0], SHAPE))
    run, mesh = gradient_on(shape)
    with jax.set_mesh(mesh):
        (_, stats), gradient = run(params(), to_global(mesh, batch), jnp.float32(1))
    return stats, gradient


def test_an_update_on_own_routes_has_the_same_gradients_and_on_foreign_ones_equal_gradients_on_every_mesh():
    stats, live = update_of(SAMPLES, (1, 1, 1), replays=False)
    own, gradient = update_of(with_own_routes(), (1, 1, 1))
    jax.tree.map(np.testing.assert_array_equal, gradient, live)
    assert "rollout/route_difference" not in stats.metrics() and own.metrics()["rollout/route_difference"] == 0
    np.testing.assert_array_equal(own.routes.load, stats.routes.load)
    foreign, expected = update_of(rotated(with_own_routes()), (1, 1, 1))
    assert foreign.metrics()["rollout/route_difference"] > 0.9
    # The router stays frozen.
    assert not np.any(expected["blocks"]["experts"]["router"])
    for shape in ((1, 1, 2), (2, 2, 2)):
        others, gradient = update_of(rotated(with_own_routes()), shape)
        assert_trees_close(gradient, expected, tolerance=2e-5)
        np.testing.assert_array_equal(others.routes.load, foreign.routes.load)
