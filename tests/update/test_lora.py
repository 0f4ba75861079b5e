"""Tests that the gradient of adapters equals that through merged kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.lora import LoRAConfig, combine_params, merge_adapters
from app.update.optimizer import DECAYED, TrainState, init_train_state, make_optimizer, train_state_shardings
from app.update.policy_loss import Objective, make_policy_objective
from app.update.step import UpdateStep
from settings.schema.algorithm import OptimizerSettings
from settings.schema.model import PROJECTIONS
from tests.tiny import BIASED, assert_trees_close, make_mesh, one_a_row, pack_update, random_params
from tests.update.test_step import EVERYTHING, SAMPLES

ARCHITECTURE = replace(BIASED, num_layers=2)
ADAPTERS = LoRAConfig(3, 6.0, PROJECTIONS)
DEFINITION = DecoderDefinition.create(ARCHITECTURE, lora=ADAPTERS)
BASE = DecoderDefinition.create(ARCHITECTURE)
PARAMS = random_params(DEFINITION)
TRAINED, FROZEN = DEFINITION.trainable(PARAMS), DEFINITION.frozen(PARAMS)
FIXED = one_a_row(len(SAMPLES), rows_per_micro_batch=4, num_tokens=16, num_targets=12)
BATCHES = pack_update(SAMPLES, FIXED)
MESH = make_mesh((2, 2, 1))
TEMPERATURE = jnp.float32(1.3)


def objective(definition: DecoderDefinition, *, remat: str) -> Objective:
    return make_policy_objective(definition, EVERYTHING, dtype=jnp.dtype("float32"), remat=remat, logits_chunk=6)


@functools.cache
def update_step() -> tuple[UpdateStep, Callable[[], TrainState]]:
    """Returns a compiled update of adapters and a function that makes initial states."""
    schedule = optax.constant_schedule(0.1)
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.1), schedule)
    shapes, lie = DEFINITION.trainable(DEFINITION.shapes), DEFINITION.trainable(DEFINITION.shardings(MESH))
    shardings = train_state_shardings(optimizer, shapes, lie, MESH)

    def fresh() -> TrainState:
        return init_train_state(optimizer, jax.device_put(jax.tree.map(np.array, TRAINED), lie), shardings)

    return UpdateStep(objective(DEFINITION, remat="minimal"), optimizer, schedule, shardings), fresh


@functools.cache
def frozen() -> Params:
    """Returns the frozen weights on their shardings."""
    return jax.device_put(FROZEN, DEFINITION.frozen(DEFINITION.shardings(MESH)))


@pytest.fixture(scope="module")
def through_merged_kernels() -> Params:
    """Returns the gradient with respect to the adapters of the same loss, through merged kernels."""
    plain = objective(BASE, remat="none")

    def loss(trained: Params) -> jax.Array:
        weights = merge_adapters(combine_params(trained, FROZEN), ADAPTERS)
        return sum((plain(weights, batch, TEMPERATURE)[0] for batch in BATCHES), jnp.float32(0))

    return jax.jit(jax.grad(loss))(TRAINED)


def test_the_gradient_is_that_through_merged_kernels(through_merged_kernels):
    assert all(float(jnp.abs(x).max()) > 1e-6 for x in jax.tree.leaves(through_merged_kernels))
    step, fresh = update_step()
    with jax.set_mesh(MESH):
        found, _ = step.accumulate(fresh().params, BATCHES, TEMPERATURE, frozen())
    assert_trees_close(found, through_merged_kernels, tolerance=2e-5)


def test_an_update_moves_every_adapter_and_leaves_the_other_weights_where_they_are():
    step, fresh = update_step()
    held = frozen()
    names = step.metric_names(fresh().params, BATCHES[0], TEMPERATURE, held)
    with jax.set_mesh(MESH):
        state, metrics = step(fresh(), BATCHES, TEMPERATURE, held)
    assert sorted(names) == sorted(metrics)
    after = flatten_by_path(state.params)
    assert after.keys() == DEFINITION.adapter_paths
    assert all(not np.array_equal(after[path], x) for path, x in flatten_by_path(TRAINED).items())
    jax.tree.map(np.testing.assert_array_equal, held, FROZEN)


def test_adapters_are_decayed_like_the_matrices_beside_them():
    decayed = {path[-1] for path in flatten_by_path(DEFINITION.shapes) if path[-1] in DECAYED}
    assert decayed == {"kernel", "embedding", "output", "lora_a", "lora_b"}


def test_no_gradient_and_no_moment_is_as_large_as_the_frozen_weights():
    step, fresh = update_step()
    state = fresh()
    lowered = step.lower(state, BATCHES[0], TEMPERATURE, FROZEN)
    trained = {x.shape for x in jax.tree.leaves(TRAINED)} | {()}
    assert {x.shape for x in jax.tree.leaves(lowered["gradients"].out_info)} == trained
    assert {x.shape for x in jax.tree.leaves(state)} == trained
