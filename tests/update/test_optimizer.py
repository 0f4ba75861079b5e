from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from app.model.decoder import DecoderDefinition
from app.update.optimizer import init_train_state, make_optimizer, make_schedule, train_state_shardings
from settings.schema.algorithm import OptimizerSettings
from tests.tiny import BIASED, EVEN, make_mesh, random_params

CONSTANT = optax.constant_schedule(0.1)


def rates(num_updates: int, **fields) -> list[float]:
    """Returns the learning rate of every update, and of the one after the last."""
    schedule = make_schedule(OptimizerSettings(learning_rate=2.0, **fields), num_updates=num_updates)
    return [float(jnp.asarray(schedule(jnp.int32(i)))) for i in range(num_updates + 1)]


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
    ],
)
def test_learning_rates_by_hand(fields, expected):
    np.testing.assert_allclose(rates(4, **fields), expected, atol=1e-6)


def test_a_warm_up_longer_than_the_run_is_cut_off():
    np.testing.assert_allclose(rates(3, schedule="cosine", warmup_steps=8), [0.25, 0.5, 0.75, 1.0])


def test_decay_touches_matrices_only():
    definition = DecoderDefinition.create(BIASED)
    params = random_params(definition)
    optimizer = make_optimizer(OptimizerSettings(weight_decay=0.5), CONSTANT)
    gradients = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(optimizer.update)(gradients, jax.jit(optimizer.init)(params), params, norm=0.0)
    seen = set()
    for (path, update), weight in zip(
        jax.tree_util.tree_leaves_with_path(updates), jax.tree.leaves(params), strict=True
    ):
        name = path[-1].key
        seen.add(name)
        decayed = name in ("kernel", "embedding", "output")
        np.testing.assert_allclose(update, -0.1 * 0.5 * weight if decayed else 0 * weight, rtol=1e-6)
    assert seen == {"kernel", "embedding", "output", "scale", "bias"}


def test_updates_equal_adamw_with_a_global_norm_clip_in_float64():
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


def test_the_shardings_of_a_state_fit_it_and_moments_lie_where_their_weights_lie():
    definition, mesh = DecoderDefinition.create(EVEN), make_mesh((1, 4, 2))
    optimizer = make_optimizer(OptimizerSettings(), CONSTANT)
    weights = definition.shardings(mesh)
    shardings = train_state_shardings(optimizer, definition.shapes, weights, mesh)
    params = jax.device_put(random_params(definition), weights)
    state = init_train_state(optimizer, params, shardings)
    assert jax.tree.structure(state) == jax.tree.structure(shardings)
    lies_at = lambda leaf, sharding: leaf.sharding.is_equivalent_to(sharding, leaf.ndim)  # noqa: E731
    assert all(jax.tree.leaves(jax.tree.map(lies_at, state, shardings)))
    adam = next(part for part in jax.tree.leaves(state.optimizer, is_leaf=is_adam) if is_adam(part))
    for moment in (adam.mu, adam.nu):
        assert all(jax.tree.leaves(jax.tree.map(lies_at, moment, weights)))
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(adam.mu))


def is_adam(node) -> bool:
    return isinstance(node, optax.ScaleByAdamState)


def test_moments_are_stored_in_the_types_of_the_settings():
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
    adam = next(part for part in jax.tree.leaves(states[1], is_leaf=is_adam) if is_adam(part))
    assert {x.dtype.name for x in jax.tree.leaves((adam.mu, adam.nu))} == {"bfloat16"}
    assert jax.tree.map(jnp.shape, states[1]) == jax.tree.map(jnp.shape, states[0])


@pytest.mark.parametrize(("beta2", "is_forgotten"), [(0.95, True), (0.999, False)])
def test_only_a_fast_decay_survives_rounding_to_8_bits(beta2, is_forgotten):
    """The reason for the limit of `optimizer.beta2`."""
    optimizer = make_optimizer(OptimizerSettings(beta2=beta2, second_moment="bfloat16"), CONSTANT)
    params = {"kernel": jnp.ones((1, 1))}
    _, state = optimizer.update(params, optimizer.init(params), params, norm=0.0)
    first = optax.tree.get(state, "nu")["kernel"]
    for _ in range(10):
        _, state = optimizer.update({"kernel": jnp.zeros((1, 1))}, state, params, norm=0.0)
    assert bool(optax.tree.get(state, "nu")["kernel"] < first) == is_forgotten
