"""Tests learning rates, and AdamW with moments in device and host memory."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from app.mesh.axis_rules import AXES
from app.mesh.chips import parse_slice
from app.mesh.devices import compile_only_devices, program_memory_bytes
from app.mesh.placement import HOST_MEMORY, abstract_arrays, bytes_per_device
from app.model.decoder import DecoderDefinition
from app.model.lora import LoRAConfig
from app.update.optimizer import (
    TrainState,
    init_train_state,
    make_optimizer,
    make_schedule,
    train_state_shardings,
    update_at_once,
    update_by_layer,
)
from app.update.policy_loss import LossStats
from app.update.step import POLICY_METRICS, AccumulatedGradients, apply_gradients
from settings.schema.algorithm import OptimizerSettings
from tests.tiny import BIASED, EVEN, EXPERTS, MIXTURE, ODD, assert_trees_close, make_mesh, random_params

CONSTANT = optax.constant_schedule(0.1)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"schedule": "constant"}, [2, 2, 2, 2, 2]),
        ({"schedule": "constant", "warmup_steps": 1}, [2, 2, 2, 2, 2]),
        ({"schedule": "constant", "warmup_steps": 4}, [0.5, 1, 1.5, 2, 2]),
        ({"schedule": "linear"}, [2, 1.5, 1, 0.5, 0]),
        ({"schedule": "linear", "final_fraction": 0.5}, [2, 1.75, 1.5, 1.25, 1]),
        ({"schedule": "linear", "warmup_steps": 2}, [1, 2, 2, 1, 0]),
        ({"schedule": "cosine"}, [2, 1 + 0.5**0.5, 1, 1 - 0.5**0.5, 0]),
        ({"schedule": "cosine", "final_fraction": 0.1, "warmup_steps": 2}, [1, 2, 2, 1.1, 0.2]),
        ({"schedule": "cosine", "warmup_steps": 8}, [0.25, 0.5, 0.75, 1, 1.25]),
    ],
)
def test_learning_rate_schedules_equal_hand_computed_values(fields, expected):
    """Checks the learning rates of all four updates and the rate after the last update."""
    schedule = make_schedule(OptimizerSettings(learning_rate=2.0, **fields), num_updates=4)
    rates = [float(jnp.asarray(schedule(jnp.int32(i)))) for i in range(5)]
    np.testing.assert_allclose(rates, expected, atol=1e-6)


def test_weight_decay_applies_only_to_matrices_and_adapters():
    adapted = DecoderDefinition.create(BIASED, lora=LoRAConfig(3, 6.0, ("q_proj",)))
    params = [random_params(one) for one in (adapted, DecoderDefinition.create(MIXTURE))]
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.5), CONSTANT)
    gradients = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params, norm=0.0)
    seen = set()
    for (path, update), weight in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        name = path[-1].key
        seen.add(name)
        decayed = name in ("kernel", "embedding", "output", "lora_a", "lora_b")
        np.testing.assert_allclose(update, -0.1 * 0.5 * weight if decayed else 0 * weight, rtol=1e-6)
    assert seen == {"kernel", "embedding", "output", "lora_a", "lora_b", "scale", "bias", "router"}


def test_optimizer_updates_equal_adamw_with_a_global_norm_clip_in_float64():
    rng = np.random.default_rng(0)
    settings = OptimizerSettings(beta1=0.8, beta2=0.9, epsilon=1e-2, weight_decay=0.3, max_grad_norm=1.5)
    optimizer = make_optimizer(settings, CONSTANT)
    weights = {"kernel": rng.normal(size=(3, 2)), "scale": rng.normal(size=3)}
    params = jax.tree.map(jnp.float32, weights)
    state = optimizer.init(params)
    first = second = jax.tree.map(np.zeros_like, weights)
    for step, size in enumerate([0.01, 10.0, 1.0], start=1):
        gradients = jax.tree.map(lambda w, size=size: size * rng.normal(size=w.shape), weights)
        given = jax.tree.map(jnp.float32, gradients)
        updates, state = optimizer.update(given, state, params, norm=optax.tree.norm(given))
        params = optax.apply_updates(params, updates)
        norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
        clipped = jax.tree.map(lambda g, norm=norm: g * min(1.0, 1.5 / norm), gradients)
        first = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, first, clipped)
        second = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, second, clipped)
        for name, decay in (("kernel", 0.3), ("scale", 0.0)):
            move = (first[name] / (1 - 0.8**step)) / (np.sqrt(second[name] / (1 - 0.9**step)) + 1e-2)
            weights[name] = weights[name] - 0.1 * (move + decay * weights[name])
    jax.tree.map(lambda p, w: np.testing.assert_allclose(p, w, rtol=1e-5), params, weights)


def test_optimizer_moments_are_stored_in_the_dtypes_of_the_settings():
    rng = np.random.default_rng(0)
    params = {"kernel": jnp.float32(rng.normal(size=(64, 2)))}
    stored = {"first_moment": "bfloat16", "second_moment": "bfloat16"}
    exact, rounded = (
        make_optimizer(OptimizerSettings.model_validate({"beta2": 0.95, **types}), CONSTANT) for types in ({}, stored)
    )
    states = [exact.init(params), rounded.init(params)]
    for _ in range(20):
        gradients = {"kernel": jnp.float32(rng.normal(size=(64, 2)))}
        (expected, states[0]), (found, states[1]) = (
            optimizer.update(gradients, state, params, norm=optax.tree.norm(gradients))
            for optimizer, state in zip((exact, rounded), states, strict=True)
        )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=0.05, atol=2e-3), found, expected)
    moments = [optax.tree.get(states[1], name) for name in ("mu", "nu")]
    assert {x.dtype.name for x in jax.tree.leaves(moments)} == {"bfloat16"}
    assert jax.tree.map(jnp.shape, states[1]) == jax.tree.map(jnp.shape, states[0])


DEEP = replace(ODD, num_layers=3)
ROUNDED = {"first_moment": "bfloat16", "second_moment": "bfloat16"}
ADAPTERS = LoRAConfig(2, 4.0, ("q_proj", "down_proj"))


class Update:
    def __init__(self, definition: DecoderDefinition, mesh: Mesh, *, offload: bool, **settings: Any):
        chosen = OptimizerSettings(learning_rate=0.01, **settings)
        schedule = make_schedule(chosen, num_updates=4)
        self.optimizer = make_optimizer(chosen, schedule)
        shapes, shardings = map(definition.trainable, (definition.shapes, definition.shardings(mesh)))
        self.layout = train_state_shardings(self.optimizer, shapes, shardings, mesh, offload=offload)

        run_update = update_by_layer if offload else update_at_once

        def apply(state: TrainState, gradients: Any) -> tuple[TrainState, dict[str, Any]]:
            total = AccumulatedGradients(gradients, LossStats({"loss": jnp.float32(1)}, {}))
            return apply_gradients(state, total, self.optimizer, schedule, POLICY_METRICS, run_update=run_update)

        self.program = jax.jit(apply, donate_argnums=0, out_shardings=(self.layout, None))


def memory_kinds(state: TrainState) -> set[tuple[bool, str]]:
    """Returns (whether it is a moment, kind of memory) of every array."""
    arrays = jax.tree.leaves_with_path(state)
    is_moment = lambda keys: any(getattr(key, "name", "") in ("mu", "nu") for key in keys)  # noqa: E731
    return {(is_moment(keys), x.sharding.memory_kind) for keys, x in arrays}


def updated(
    definition: DecoderDefinition, shape: tuple[int, int, int], *, offload: bool, spoiled: int, **types: Any
) -> tuple[TrainState, list[dict[str, float]]]:
    """Returns the state and metrics of 4 updates; some gradients are clipped and one is not finite."""
    run = Update(definition, make_mesh(shape), offload=offload, weight_decay=0.1, beta2=0.9, warmup_steps=2, **types)
    weights = jax.device_put(definition.trainable(random_params(definition)), run.layout.params)
    state, metrics = init_train_state(run.optimizer, weights, run.layout), []
    for i in range(4):
        rng = np.random.default_rng(i)
        gradients = jax.tree.map(lambda x, rng=rng, i=i: np.float32(rng.normal(size=x.shape) * 0.1**i), weights)
        if i == spoiled:
            gradients = jax.tree.map(lambda x: x * np.float32(np.nan), gradients)
        state, measured = run.program(state, jax.device_put(gradients, run.layout.params))
        metrics.append({name: np.asarray(value).tolist() for name, value in measured.items()})
    assert memory_kinds(state) == {(False, "device"), (True, HOST_MEMORY if offload else "device")}
    return jax.tree.map(np.asarray, state), metrics


@pytest.mark.parametrize(
    ("architecture", "lora", "shape", "types"),
    [(replace(EVEN, **EXPERTS), None, (1, 2, 2), {}), (DEEP, ADAPTERS, (1, 1, 1), ROUNDED)],
    ids=["experts", "adapters"],
)
def test_offloaded_moments_give_the_same_updates_as_moments_on_the_device(architecture, lora, shape, types):
    definition = DecoderDefinition.create(architecture, lora=lora)
    here, expected = updated(definition, shape, offload=False, spoiled=1, **types)
    away, metrics = updated(definition, shape, offload=True, spoiled=1, **types)
    assert [one["policy/nonfinite_updates"] for one in metrics] == [0, 1, 1, 1]
    assert [one["policy/grad_norm"] > 1 for one in (*metrics[:1], *metrics[2:])].count(True) in (1, 2)
    np.testing.assert_equal(metrics, expected)
    jax.tree.map(np.testing.assert_array_equal, away.optimizer, here.optimizer)
    counts = [int(value) for path, value in optax.tree.get_all_with_path(away.optimizer, "count")]
    assert (int(away.num_updates), set(counts)) == (3, {3})
    # Depending on the loop around it, XLA may round once or twice when it adds a product to a weight.
    assert_trees_close(away.params, here.params, tolerance=3e-7)


@pytest.mark.slow
def test_a_tpu_holds_the_moments_of_one_layer_at_a_time() -> None:
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    sizes = {"model_dim": 512, "mlp_dim": 4096, "vocab_size": 1024, "num_layers": 16}
    definition = DecoderDefinition.create(replace(EVEN, **sizes))
    mesh = Mesh(np.array(compile_only_devices(parse_slice("v5e-8"))).reshape(1, 4, 2), AXES)
    found = {}
    for offload in (False, True):
        run = Update(definition, mesh, offload=offload)
        params = abstract_arrays(definition.shapes, run.layout.params)
        optimizer = abstract_arrays(jax.eval_shape(run.optimizer.init, params), run.layout.optimizer)
        counter: Any = jax.ShapeDtypeStruct((), jnp.int32, sharding=run.layout.num_updates)
        program = run.program.lower(TrainState(params, optimizer, counter, counter, counter), params).compile()
        found[offload] = program_memory_bytes(program)
        weights = bytes_per_device(params)
    # Without offload, the device holds weights, gradients and two moments. With offload, it holds the moments of only
    # the current and the next layer, each before and after the update.
    assert found[False] == pytest.approx(4 * weights, rel=0.05)
    assert found[True] < (2 + 2 * 4 / 16) * weights
