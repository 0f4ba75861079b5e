"""Tests an optimizer step of a decoder, with and without adapters."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.batching.micro_batch_plan import MicroBatchPlan
from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.io.hf_weights import load_weights
from app.model.lora import LoRAConfig, combine_params, merge_adapters
from app.update.kl import k3
from app.update.loss_aggregation import aggregations
from app.update.optimizer import TrainState, init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import Objective, PolicyBatch, PolicyLoss, dual_clipped_surrogate, make_policy_objective
from app.update.ratios import ImportanceCorrection, geometric_log_weight, mask_weights
from app.update.step import BROKEN_GRADIENTS, UpdateStep
from settings.schema.algorithm import OptimizerSettings
from settings.schema.model import PROJECTIONS
from tests import tiny
from tests.model.io.tensors_in_memory import Held, random_file
from tests.quantized import dequantized_params

DEFINITION = DecoderDefinition.create(replace(tiny.ODD, num_layers=1))
ADAPTERS = LoRAConfig(3, 6.0, PROJECTIONS)
ADAPTED = DecoderDefinition.create(replace(tiny.BIASED, num_layers=2), lora=ADAPTERS)
TEMPERATURE = jnp.float32(1.3)
SAMPLES = tiny.random_samples(4, 2, vocab_size=tiny.ODD.vocab_size, with_holes=True)
FOURS = tiny.one_a_row(len(SAMPLES), rows_per_micro_batch=4, num_tokens=16, num_targets=12)
SHARED_ROWS = tiny.plan_of(((5, 0, 3), (1, 7), (), (2, 6, 4)), rows_per_micro_batch=2, num_tokens=48, num_targets=30)
SHARED_PROMPTS = tiny.packed_plan(SAMPLES, quota=72, row_length=24, share_prompts=True)

EVERYTHING = replace(
    tiny.PLAIN_LOSS,
    surrogate=functools.partial(dual_clipped_surrogate, clip_low=0.2, clip_high=0.3, dual_clip=1.5),
    kl_estimator=k3,
    beta=0.3,
    entropy_coef=0.2,
    correction=ImportanceCorrection(
        geometric_log_weight, functools.partial(mask_weights, min_weight=0.1, max_weight=4.0), veto=0.1
    ),
)


@functools.cache
def update_step(loss: PolicyLoss, *, of_adapters: bool = False) -> tuple[UpdateStep, Callable[[], TrainState]]:
    definition, mesh = (ADAPTED, tiny.make_mesh((2, 2, 1))) if of_adapters else (DEFINITION, tiny.make_mesh())
    schedule = optax.linear_schedule(0.5, 0.0, 5)
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.1), schedule)
    shapes, places = map(definition.trainable, (definition.shapes, definition.shardings(mesh)))
    shardings = train_state_shardings(optimizer, shapes, places, mesh)
    objective = objective_of(definition, loss, remat="minimal" if of_adapters else "none")

    def fresh() -> TrainState:
        params = jax.tree.map(np.array, definition.trainable(tiny.random_params(definition)))
        return init_train_state(optimizer, jax.device_put(params, places), shardings)

    return UpdateStep(objective, optimizer, schedule, shardings), fresh


def objective_of(definition: DecoderDefinition, loss: PolicyLoss = EVERYTHING, *, remat: str) -> Objective:
    return make_policy_objective(definition, loss, dtype=jnp.dtype("float32"), remat=remat, logits_chunk=6)


def test_packing_changes_neither_gradient_nor_metrics_of_an_update():
    # test_policy_loss.py covers every combination of terms; this test computes them from a decoder.
    step, fresh = update_step(EVERYTHING)
    state = fresh()
    for weights in aggregations(max_new_tokens=9).values():

        def summed(plan: MicroBatchPlan, weights=weights):
            return step.accumulate(state.params, tiny.pack_update(SAMPLES, plan, weights=weights), TEMPERATURE)

        gradient, parts = expected = summed(FOURS)
        assert optax.tree.norm(gradient) > 1e-3
        assert float(parts.maxima["policy/ratio_max"]) > 1.5
        for plan in (SHARED_ROWS, SHARED_PROMPTS):
            tiny.assert_trees_close(summed(plan), expected)


def on_host(state: TrainState) -> TrainState:
    return jax.tree.map(np.array, state)


GOOD = tiny.pack_update(SAMPLES, FOURS)
BAD = [replace(one, advantages=np.where(one.tokens.loss_mask, np.float32(np.nan), one.advantages)) for one in GOOD]


def test_an_optimizer_step_changes_every_weight_and_is_counted():
    update, fresh = update_step(tiny.PLAIN_LOSS)
    before = on_host(fresh())
    state, metrics = update(fresh(), GOOD, TEMPERATURE)
    after = on_host(state)
    assert not any(map(np.array_equal, jax.tree.leaves(after.params), jax.tree.leaves(before.params)))
    assert (after.num_updates, after.nonfinite_in_a_row, after.nonfinite_total) == (1, 0, 0)
    assert float(metrics["policy/learning_rate"]) == pytest.approx(0.5)
    assert float(metrics["policy/grad_norm"]) > 0
    _, second = update(state, GOOD, TEMPERATURE)
    assert float(second["policy/learning_rate"]) == pytest.approx(0.4)


def test_non_finite_optimizer_steps_are_skipped_and_counted():
    def with_one(field: str, value: float) -> list[PolicyBatch]:
        values = getattr(GOOD[0], field).copy()
        values[tuple(np.argwhere(GOOD[0].tokens.loss_mask)[0])] = value
        return [replace(GOOD[0], **{field: values}), *GOOD[1:]]

    update, fresh = update_step(tiny.PLAIN_LOSS)
    # Sampler logprobs are only used for a metric, so a non-finite one must not skip the step.
    state, metrics = update(fresh(), with_one("behavior_logprobs", np.nan), TEMPERATURE)
    assert (int(state.num_updates), int(metrics["policy/nonfinite_updates"])) == (1, 0)
    before, counts = on_host(state), []
    for batch in (with_one("advantages", np.inf), BAD):
        state, metrics = update(state, batch, TEMPERATURE)
        after = on_host(state)
        jax.tree.map(np.testing.assert_array_equal, (after.params, after.optimizer), (before.params, before.optimizer))
        counts.append((int(metrics["policy/nonfinite_in_a_row"]), int(metrics["policy/nonfinite_updates"])))
        assert metrics[BROKEN_GRADIENTS].all()
    for batch in (GOOD, BAD):
        state, metrics = update(state, batch, TEMPERATURE)
        counts.append((int(metrics["policy/nonfinite_in_a_row"]), int(metrics["policy/nonfinite_updates"])))
    assert counts == [(1, 1), (2, 2), (0, 2), (1, 3)]
    after = on_host(state)
    assert (after.num_updates, after.nonfinite_in_a_row, after.nonfinite_total) == (2, 1, 3)


PARAMS = tiny.random_params(ADAPTED)
TRAINED, FROZEN = ADAPTED.trainable(PARAMS), ADAPTED.frozen(PARAMS)


@pytest.fixture
def adapted() -> Iterator[tuple[UpdateStep, TrainState, Params]]:
    """Returns a compiled update of adapters, an initial state and the sharded frozen weights."""
    step, fresh = update_step(EVERYTHING, of_adapters=True)
    mesh = tiny.make_mesh((2, 2, 1))
    with jax.set_mesh(mesh):
        yield step, fresh(), jax.device_put(FROZEN, ADAPTED.frozen(ADAPTED.shardings(mesh)))


@pytest.fixture(scope="module")
def through_merged_kernels() -> Params:
    """Returns the adapter gradient of the same loss through merged kernels on one device."""
    plain = objective_of(DecoderDefinition.create(ADAPTED.architecture), remat="none")

    def loss(trained: Params, batch: PolicyBatch) -> jax.Array:
        return plain(merge_adapters(combine_params(trained, FROZEN), ADAPTERS), batch, TEMPERATURE)[0]

    gradients = [jax.jit(jax.grad(loss))(TRAINED, batch) for batch in GOOD]
    return jax.tree.map(lambda *parts: sum(parts), *gradients)


def test_adapter_gradient_equals_the_gradient_through_merged_kernels(through_merged_kernels, adapted):
    assert all(float(jnp.abs(x).max()) > 1e-6 for x in jax.tree.leaves(through_merged_kernels))
    step, state, frozen = adapted
    found, _ = step.accumulate(state.params, GOOD, TEMPERATURE, frozen)
    tiny.assert_trees_close(found, through_merged_kernels, tolerance=2e-5)


def test_an_update_changes_every_adapter_and_no_frozen_weight(adapted):
    step, state, frozen = adapted
    names = step.metric_names(state.params, GOOD[0], TEMPERATURE, frozen)
    state, metrics = step(state, GOOD, TEMPERATURE, frozen)
    assert sorted([*names, BROKEN_GRADIENTS]) == sorted(metrics)
    after = flatten_by_path(state.params)
    assert after.keys() == ADAPTED.adapter_paths
    assert all(not np.array_equal(after[path], x) for path, x in flatten_by_path(TRAINED).items())
    jax.tree.map(np.testing.assert_array_equal, frozen, FROZEN)


@pytest.mark.parametrize(
    ("quantization", "remat", "mesh_shape"), [("int8", "block", (1, 1, 1)), ("nf4", "minimal", (2, 2, 2))], ids=str
)
def test_adapter_gradient_with_a_quantized_base_equals_the_gradient_through_dequantized_kernels(
    quantization, remat, mesh_shape
):
    pytest.importorskip("qwix", reason="Qwix is not installed: pip install -e '.[qlora]'")
    architecture, mesh = replace(tiny.EVEN, num_layers=1), tiny.make_mesh(mesh_shape)
    definition = DecoderDefinition.create(architecture, lora=ADAPTERS, quantization=quantization)
    (batch,) = tiny.pack_update(
        SAMPLES, tiny.one_a_row(len(SAMPLES), rows_per_micro_batch=8, num_tokens=16, num_targets=12)
    )

    def gradient(definition: DecoderDefinition, trained: Params, frozen: Params, *, remat: str) -> Params:
        objective = objective_of(definition, remat=remat)

        def loss(trained: Params, frozen: Params) -> jax.Array:
            return objective(combine_params(trained, frozen), batch, TEMPERATURE)[0]

        return jax.jit(jax.grad(loss))(trained, frozen)

    adapters = definition.trainable(tiny.random_params(definition.unquantized))
    held = load_weights(definition.without_adapters, Held(random_file(architecture)[1]), mesh)
    floats = dequantized_params(definition.without_adapters, held)
    expected = gradient(definition.unquantized, adapters, floats, remat="none")
    assert all(float(jnp.abs(x).max()) > 1e-6 for x in jax.tree.leaves(expected))
    with jax.set_mesh(mesh):
        placed = jax.device_put(adapters, definition.trainable(definition.shardings(mesh)))
        found = gradient(definition, placed, held, remat=remat)
    tiny.assert_trees_close(found, expected, tolerance=1e-5)
    assert jax.tree.structure(combine_params(found, held)) == jax.tree.structure(definition.shapes)
