from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.advantage.gae.chunked import solve_constant_decay, solve_variable_decay
from app.advantage.gae.estimate import BACKENDS, generalized_advantages
from app.advantage.gae.recurrence import MASK_MODES
from tests.advantage.gae_oracle import Case, oracle, random_case

DISCOUNTS = list(itertools.product((0.0, 0.5, 0.95, 0.99, 1.0), repeat=2))


def estimate(case: Case, **options) -> tuple[np.ndarray, np.ndarray]:
    advantages, returns = generalized_advantages(
        case.rewards, case.values, mask=case.mask, ends=case.ends, bootstrap=case.bootstrap, **options
    )
    return np.asarray(advantages), np.asarray(returns)


def assert_close(got, expected) -> None:
    """Asserts equality within the contract: 1e-5 of the largest advantage."""
    limit = 1e-5 * max(1.0, float(np.abs(expected[0]).max(initial=0)))
    for one, truth in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, truth, rtol=0, atol=limit)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_mode", MASK_MODES)
@pytest.mark.parametrize("num_tokens", [1, 129])
def test_every_backend_equals_a_float64_loop(backend, mask_mode, num_tokens):
    case = random_case(np.random.default_rng(num_tokens), (3, num_tokens), masked=True, packed=True)
    for gamma, lam in DISCOUNTS:
        got = estimate(case, gamma=gamma, lam=lam, mask_mode=mask_mode, backend=backend)
        assert_close(got, oracle(case, gamma=gamma, lam=lam, mask_mode=mask_mode))


@pytest.mark.parametrize("backend", BACKENDS)
def test_long_sums_without_decay_stay_exact(backend):
    rewards = np.ones((1, 131_072), np.float32)
    advantages, _ = estimate(Case(rewards, 0 * rewards), gamma=1.0, lam=1.0, backend=backend)
    np.testing.assert_array_equal(advantages[0], np.arange(131_072, 0, -1))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_mode", MASK_MODES)
def test_long_masked_rows_stay_within_the_contract(backend, mask_mode):
    case = random_case(np.random.default_rng(1), (1, 131_072), masked=True, packed=False)
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.9999), (0.5, 0.5), (0.0, 1.0)):
        options = {"gamma": gamma, "lam": lam, "mask_mode": mask_mode}
        assert_close(estimate(case, backend=backend, **options), oracle(case, **options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("masked", [False, True])
def test_discounts_close_to_one_keep_their_digits(backend, masked):
    rewards = np.ones((1, 20_000), np.float32)
    mask = np.arange(20_000)[None] % 3 > 0 if masked else None
    case = Case(rewards, np.full((1, 20_001), 0.5, np.float32), mask)
    for gamma, lam in ((0.999, 1.0), (0.9999, 1.0), (1.0, 0.9999), (0.9999, 0.9999)):
        assert_close(estimate(case, gamma=gamma, lam=lam, backend=backend), oracle(case, gamma=gamma, lam=lam))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_mode", MASK_MODES)
def test_long_rows_with_discounts_per_token_stay_within_the_contract(backend, mask_mode):
    rng = np.random.default_rng(9)
    case = random_case(rng, (2, 20_000), masked=True, packed=True)
    assert case.ends is not None
    case = case._replace(ends=case.ends & (rng.random(case.ends.shape) < 0.01))
    options: Any = {"gamma": 1 - 1e-3 * rng.random((2, 20_000)), "lam": rng.random((2, 1)), "mask_mode": mask_mode}
    assert_close(estimate(case, backend=backend, **options), oracle(case, **options))
    options["lam"] = 1.0
    assert_close(estimate(case, backend=backend, **options), oracle(case, **options))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("center", "num_tokens"), [(1.5, 131_072), (100, 4096)])
@pytest.mark.parametrize(("masked", "bootstrapped"), [(False, True), (True, False)])
def test_small_advantages_survive_large_values(backend, center, num_tokens, masked, bootstrapped):
    """The critic is nearly correct, so advantages are small differences of large numbers."""
    rng = np.random.default_rng(2)
    rewards = np.full((1, num_tokens), -0.001, np.float32)
    values = np.float32(center) + rng.uniform(-0.1, 0.1, (1, num_tokens + bootstrapped)).astype(np.float32)
    case = Case(rewards, values, np.arange(num_tokens)[None] % 5 > 0 if masked else None)
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.999, 0.95), (0.99, 0.95)):
        assert_close(estimate(case, gamma=gamma, lam=lam, backend=backend), oracle(case, gamma=gamma, lam=lam))


@pytest.mark.parametrize("backend", BACKENDS)
def test_bfloat16_inputs_are_computed_in_float32(backend):
    case = random_case(np.random.default_rng(1), (2, 300), masked=False, packed=False)
    rounded = Case(*(np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in case[:2]))
    exact = Case(*(x.astype(np.float32) for x in rounded[:2]))
    got = estimate(rounded, gamma=0.99, lam=0.95, backend=backend)
    assert got[0].dtype == got[1].dtype == np.float32
    assert_close(got, oracle(exact, gamma=0.99, lam=0.95))


@pytest.mark.parametrize("dtype", [np.int64, bool])
def test_rewards_of_any_number_type_are_promoted(dtype):
    rewards = np.array([[0, 0, 1]], dtype)
    advantages, _ = estimate(Case(rewards, np.zeros((1, 3))), gamma=0.5, lam=1.0)
    np.testing.assert_array_equal(advantages, [[0.25, 0.5, 1.0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("lam", "expected"),
    [
        (1.0, [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3, 2, 1, 0, -4.9]]),
        (0.7, [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1, 0, -4.9]]),
    ],
)
def test_per_step_discounts_with_a_boundary_match_the_numbers_of_rlax(backend, lam, expected):
    rewards = np.array([[0, 0, 1, 0, -0.5], [0, 0, 0, 0, 1]])
    values = np.array([[1, 4, -3, -2, -1, -1], [-3, -2, -1, 0, 5, -1]])
    discounts = np.array([[0.99] * 5, [0.9, 0.9, 0.9, 0, 0.9]], np.float32)
    advantages, _ = estimate(Case(rewards, values), gamma=discounts, lam=lam, backend=backend)
    np.testing.assert_allclose(advantages, expected, atol=1e-3)


TOOL_MASK = np.array([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0]], bool)
TOOL_REWARDS = np.array([[0, 0, 0.1, 0.1, 0.1, 0, 0, 0.1, 1, 0, 0]])
TOOL_VALUES = np.array([[50, 0.3, 4, 5, 6, -20, 0.7, 7, 9, 0, 0]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("mask_mode", "expected"),
    [
        ("skip", [-2.205239, -3.280981, -4.4222, -5.64, -8]),
        ("through", [-3.134049, -4.367309, -5.692759, -5.64, -8]),
        ("zero", [-2.495815, -3.620836, -4.819691, -5.64, -8]),
    ],
)
def test_tool_tokens_mean_what_the_mask_mode_says(backend, mask_mode, expected):
    case = Case(TOOL_REWARDS, TOOL_VALUES, TOOL_MASK)
    advantages, returns = estimate(case, gamma=0.9, lam=0.95, mask_mode=mask_mode, backend=backend)
    np.testing.assert_allclose(advantages[TOOL_MASK], expected, atol=1e-5)
    np.testing.assert_allclose(returns[TOOL_MASK], np.add(expected, TOOL_VALUES[TOOL_MASK]), atol=1e-5)
    assert not advantages[~TOOL_MASK].any()
    assert not returns[~TOOL_MASK].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_mode", ["skip", "zero"])
def test_garbage_in_masked_slots_changes_nothing(backend, mask_mode):
    clean = random_case(np.random.default_rng(3), (2, 40), masked=True, packed=True)
    assert clean.mask is not None
    garbage = clean._replace(
        rewards=np.where(clean.mask, clean.rewards, np.nan), values=np.where(clean.mask, clean.values, np.inf)
    )
    options = {"gamma": 0.9, "lam": 0.95, "mask_mode": mask_mode, "backend": backend}
    np.testing.assert_array_equal(estimate(garbage, **options), estimate(clean, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_any_token_of_the_policy_get_zeros(backend):
    case = random_case(np.random.default_rng(5), (2, 9), masked=True, packed=False)
    got = estimate(case._replace(mask=np.zeros((2, 9), bool)), gamma=0.9, lam=0.9, backend=backend)
    np.testing.assert_array_equal(got, np.zeros((2, 2, 9)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3, 0), (0, 4)])
def test_no_rows_and_no_tokens_are_defined(backend, shape):
    case = random_case(np.random.default_rng(6), shape, masked=True, packed=False)
    advantages, returns = estimate(case, gamma=0.9, lam=0.9, backend=backend)
    assert advantages.shape == returns.shape == shape


@pytest.mark.parametrize("chunk_size", [1, 5, 1000])
@pytest.mark.parametrize("masked", [False, True])
def test_the_chunk_size_changes_nothing(chunk_size, masked):
    case = random_case(np.random.default_rng(7), (2, 200), masked=masked, packed=masked)
    got = estimate(case, gamma=0.99, lam=0.95, backend="chunked", chunk_size=chunk_size)
    assert_close(got, oracle(case, gamma=0.99, lam=0.95))


def test_other_discounts_compile_nothing_anew():
    case = random_case(np.random.default_rng(8), (2, 33), masked=True, packed=False)
    estimate(case, gamma=0.9, lam=0.95, backend="chunked")
    compilations = []

    def count(event: str, duration_secs: float, **_: object) -> None:
        compilations.append(event)

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        for gamma, lam in DISCOUNTS:
            estimate(case, gamma=gamma, lam=lam, backend="chunked")
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    assert not [event for event in compilations if "backend_compile" in event]


def test_every_product_is_of_full_precision():
    jaxpr = str(
        jax.make_jaxpr(partial(solve_constant_decay, chunk_size=64))(
            jax.ShapeDtypeStruct((2, 5000), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
        )
    )
    assert jaxpr.count("dot_general") == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 1


@pytest.mark.parametrize("one_decay", [True, False])
def test_memory_grows_with_the_tokens_and_not_with_their_square(one_decay):
    solve, size = (solve_constant_decay if one_decay else solve_variable_decay), 128

    def temporary_bytes(num_tokens: int) -> int:
        inputs = jax.ShapeDtypeStruct((1, num_tokens), jnp.float32)
        decays = jax.ShapeDtypeStruct(() if one_decay else inputs.shape, jnp.float32)
        analysis = jax.jit(partial(solve, chunk_size=size)).lower(inputs, decays).compile().memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes

    for num_tokens in (16_384, 65_536):
        assert temporary_bytes(num_tokens) <= 4 * (12 * num_tokens + 4 * size**2)
