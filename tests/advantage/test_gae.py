"""Tests generalized advantage estimation on both backends, and V-trace, against float64 loops."""

import itertools
from contextlib import closing
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.advantage.gae import numpy_scan
from app.advantage.gae.chunked import solve_constant_decay, solve_variable_decay
from app.advantage.gae.estimate import BACKENDS, generalized_advantages
from app.advantage.gae.recurrence import MASK_MODES
from app.advantage.vtrace import vtrace
from app.mesh.program_cache import CompilationCounter
from tests.advantage.gae_oracle import Case, oracle, random_case

DISCOUNTS = list(itertools.product((0.0, 0.5, 0.95, 0.99, 1.0), repeat=2))


def estimate(case: Case, **options: Any) -> tuple[np.ndarray, np.ndarray]:
    advantages, returns = generalized_advantages(
        case.rewards, case.values, mask=case.mask, ends=case.ends, bootstrap=case.bootstrap, **options
    )
    return np.asarray(advantages), np.asarray(returns)


def assert_close(got: Any, expected: Any) -> None:
    """Asserts equality within the contract: 1e-5 of the largest advantage."""
    limit = 1e-5 * max(1.0, float(np.abs(expected[0]).max(initial=0)))
    for one, truth in zip(got, expected, strict=True):
        assert one.dtype == np.float32
        np.testing.assert_allclose(one, truth, rtol=0, atol=limit)


def assert_backends_equal_the_loop(case: Case, **options: Any) -> None:
    expected = oracle(case, **options)
    for backend in BACKENDS:
        assert_close(estimate(case, backend=backend, **options), expected)


@pytest.mark.parametrize("mask_mode", MASK_MODES)
@pytest.mark.parametrize("num_tokens", [1, 129])
def test_gae_backends_equal_a_float64_loop(mask_mode, num_tokens):
    case = random_case(np.random.default_rng(num_tokens), (3, num_tokens), masked=True, packed=True)
    for gamma, lam in DISCOUNTS:
        assert_backends_equal_the_loop(case, gamma=gamma, lam=lam, mask_mode=mask_mode)


@pytest.mark.parametrize("mask_mode", MASK_MODES)
def test_gae_of_long_masked_rows_equals_a_float64_loop(mask_mode):
    case = random_case(np.random.default_rng(1), (1, 131_072), masked=True, packed=False)
    for gamma, lam in ((1.0, 1.0), (0.99, 0.95), (1.0, 0.9999), (0.9999, 1.0)):
        assert_backends_equal_the_loop(case, gamma=gamma, lam=lam, mask_mode=mask_mode)


@pytest.mark.parametrize("mask_mode", MASK_MODES)
def test_gae_with_discounts_per_token_equals_a_float64_loop(mask_mode):
    rng = np.random.default_rng(9)
    case = random_case(rng, (2, 20_000), masked=True, packed=True)
    assert case.ends is not None
    case = case._replace(ends=case.ends & (rng.random(case.ends.shape) < 0.01))
    for lam in (rng.random((2, 1)), 1.0):
        assert_backends_equal_the_loop(case, gamma=1 - 1e-3 * rng.random((2, 20_000)), lam=lam, mask_mode=mask_mode)


@pytest.mark.parametrize(("center", "num_tokens", "masked"), [(1.5, 131_072, True), (100, 4096, False)])
def test_gae_keeps_small_advantages_precise_when_values_are_large(center, num_tokens, masked):
    """The critic is nearly correct, so advantages are small differences of large numbers."""
    rng = np.random.default_rng(2)
    rewards = np.full((1, num_tokens), -0.001, np.float32)
    values = np.float32(center) + rng.uniform(-0.1, 0.1, (1, num_tokens + (not masked))).astype(np.float32)
    case = Case(rewards, values, np.arange(num_tokens)[None] % 5 > 0 if masked else None)
    for gamma, lam in ((1.0, 1.0), (1.0, 0.95), (0.999, 0.95), (0.99, 0.95)):
        assert_backends_equal_the_loop(case, gamma=gamma, lam=lam)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gae_returns_float32_for_inputs_of_any_dtype(backend):
    case = random_case(np.random.default_rng(1), (2, 300), masked=False, packed=False)
    rounded = Case(*(np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in case[:2]))
    exact = Case(*(x.astype(np.float32) for x in rounded[:2]))
    assert_close(estimate(rounded, gamma=0.99, lam=0.95, backend=backend), oracle(exact, gamma=0.99, lam=0.95))
    for dtype in (np.int64, bool):
        whole = Case(np.array([[0, 0, 1]], dtype), np.zeros((1, 3)))
        np.testing.assert_array_equal(estimate(whole, gamma=0.5, lam=1.0, backend=backend)[0], [[0.25, 0.5, 1.0]])


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
def test_gae_mask_mode_skips_passes_through_or_zeroes_tool_tokens(backend, mask_mode, expected):
    case = Case(TOOL_REWARDS, TOOL_VALUES, TOOL_MASK)
    advantages, returns = estimate(case, gamma=0.9, lam=0.95, mask_mode=mask_mode, backend=backend)
    np.testing.assert_allclose(advantages[TOOL_MASK], expected, atol=1e-5)
    np.testing.assert_allclose(returns[TOOL_MASK], np.add(expected, TOOL_VALUES[TOOL_MASK]), atol=1e-5)
    assert not advantages[~TOOL_MASK].any()
    assert not returns[~TOOL_MASK].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask_mode", ["skip", "zero"])
def test_gae_ignores_rewards_and_values_at_masked_tokens(backend, mask_mode):
    clean = random_case(np.random.default_rng(3), (2, 40), masked=True, packed=True)
    assert clean.mask is not None
    garbage = clean._replace(
        rewards=np.where(clean.mask, clean.rewards, np.nan), values=np.where(clean.mask, clean.values, np.inf)
    )
    options = {"gamma": 0.9, "lam": 0.95, "mask_mode": mask_mode, "backend": backend}
    np.testing.assert_array_equal(estimate(garbage, **options), estimate(clean, **options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_fully_masked_rows_get_zero_advantages_and_returns(backend):
    for shape in ((2, 9), (3, 0), (0, 4)):
        case = random_case(np.random.default_rng(5), shape, masked=True, packed=False)
        got = estimate(case._replace(mask=np.zeros(shape, bool)), gamma=0.9, lam=0.9, backend=backend)
        np.testing.assert_array_equal(got, np.zeros((2, *shape)))


@pytest.mark.parametrize(("chunk_size", "masked"), [(1, True), (5, False), (1000, True)])
def test_chunk_size_does_not_change_gae(chunk_size, masked):
    case = random_case(np.random.default_rng(7), (2, 200), masked=masked, packed=masked)
    got = estimate(case, gamma=0.99, lam=0.95, backend="chunked", chunk_size=chunk_size)
    assert_close(got, oracle(case, gamma=0.99, lam=0.95))


def test_new_values_of_gamma_and_lambda_do_not_recompile_gae():
    case = random_case(np.random.default_rng(8), (2, 33), masked=True, packed=False)
    estimate(case, gamma=0.9, lam=0.95, backend="chunked")
    with closing(CompilationCounter()) as compilations:
        for gamma, lam in DISCOUNTS:
            estimate(case, gamma=gamma, lam=lam, backend="chunked")
        assert compilations.take_count() == 0


def test_every_matmul_of_the_gae_chunk_scan_has_full_precision():
    inputs, log_decay = jax.ShapeDtypeStruct((2, 5000), jnp.float32), jax.ShapeDtypeStruct((), jnp.float32)
    jaxpr = str(jax.make_jaxpr(partial(solve_constant_decay, chunk_size=64))(inputs, log_decay))
    assert jaxpr.count("dot_general") == jaxpr.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") > 1


@pytest.mark.parametrize("solve", [solve_constant_decay, solve_variable_decay])
def test_memory_of_the_gae_chunk_scan_is_linear_in_the_tokens(solve):
    size, num_tokens = 128, 65_536
    inputs = jax.ShapeDtypeStruct((1, num_tokens), jnp.float32)
    decays = jax.ShapeDtypeStruct(() if solve is solve_constant_decay else inputs.shape, jnp.float32)
    analysis = jax.jit(partial(solve, chunk_size=size)).lower(inputs, decays).compile().memory_analysis()
    assert analysis is not None
    assert analysis.temp_size_in_bytes <= 4 * (12 * num_tokens + 4 * size**2)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 700), min_size=1, max_size=12),
    few_steps=st.sampled_from([64, 100, 512]),
    block_tokens=st.sampled_from([32, 256, 4096]),
    thread_tokens=st.sampled_from([100, 1 << 19]),
    masked_share=st.sampled_from([0.0, 0.1, 0.9]),
    mask_mode=st.sampled_from(sorted(MASK_MODES)),
    seed=st.integers(0, 1000),
)
def test_gae_of_packed_sequences_of_any_length_equals_a_float64_loop(
    lengths, few_steps, block_tokens, thread_tokens, masked_share, mask_mode, seed
):
    rng = np.random.default_rng(seed)
    shape = 1, sum(lengths)
    rewards, values, bootstrap = rng.standard_normal((3, *shape), np.float32)
    ends = np.zeros(shape, bool)
    ends[0, np.cumsum(lengths) - 1] = True
    case = Case(rewards, values, rng.random(shape) >= masked_share, ends, bootstrap)
    options = {"gamma": 0.99, "lam": 0.95, "mask_mode": mask_mode}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy_scan, "FEW_STEPS", few_steps)
        patch.setattr(numpy_scan, "BLOCK_TOKENS", block_tokens)
        patch.setattr(numpy_scan, "THREAD_TOKENS", thread_tokens)
        assert_close(estimate(case, backend="numpy", **options), oracle(case, **options))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_non_finite_reward_affects_only_the_gae_of_its_sequence(bad):
    case = random_case(np.random.default_rng(0), (1, 4000), masked=False, packed=False)
    ends = np.zeros((1, 4000), bool)
    ends[0, [99, 1000, 1006, 1010, 3000]] = True
    clean = estimate(case._replace(ends=ends), gamma=0.99, lam=0.95)
    rewards = case.rewards.copy()
    rewards[0, 1008] = bad
    got = estimate(case._replace(rewards=rewards, ends=ends), gamma=0.99, lam=0.95)
    for one, expected in zip(got, clean, strict=True):
        assert not np.isfinite(one[0, 1007:1009]).any()
        others = np.r_[0:1007, 1011:4000]
        np.testing.assert_array_equal(one[0, others], expected[0, others])


def test_gae_accepts_any_memory_layout_and_leaves_its_inputs_unchanged():
    case = random_case(np.random.default_rng(0), (70, 1024), masked=True, packed=True)
    by_time = case._replace(**{name: np.asfortranarray(x) for name, x in case._asdict().items()})
    expected = oracle(case, gamma=0.99, lam=0.95, mask_mode="zero")
    for layout in (case, by_time):
        before = [x.copy() for x in layout if x is not None]
        assert_close(estimate(layout, gamma=0.99, lam=0.95, mask_mode="zero"), expected)
        for x, copy in zip(layout, before, strict=True):
            np.testing.assert_array_equal(x, copy)


def test_vtrace_equals_gae_for_on_policy_samples():
    case = random_case(np.random.default_rng(0), (2, 150), masked=True, packed=True)
    options: Any = {"mask": case.mask, "ends": case.ends, "bootstrap": case.bootstrap}
    # Ratios at masked tokens are not read.
    log_ratios = np.where(case.mask, 0.0, np.nan) if case.mask is not None else np.zeros((2, 150))
    for lam in (1.0, 0.8, np.random.default_rng(1).random((2, 150))):
        gae = generalized_advantages(case.rewards, case.values, gamma=0.9, lam=lam, **options)
        got = vtrace(case.rewards, case.values, log_ratios, gamma=0.9, lam=lam, **options)
        np.testing.assert_allclose(got, gae, atol=1e-5)


def test_vtrace_for_off_policy_samples_equals_the_recursion_of_its_paper():
    rng = np.random.default_rng(1)
    rewards, values, log_ratios = (rng.standard_normal((1, n)) for n in (9, 10, 9))
    gamma, lam = 0.9, 0.8
    got = vtrace(rewards, values, log_ratios, gamma=gamma, lam=lam)
    weights = np.minimum(1.0, np.exp(log_ratios[0]))
    targets = values[0].copy()
    for t in reversed(range(9)):
        delta = weights[t] * (rewards[0, t] + gamma * values[0, t + 1] - values[0, t])
        targets[t] = values[0, t] + delta + gamma * lam * weights[t] * (targets[t + 1] - values[0, t + 1])
    behind = np.append(lam * targets[1:9] + (1 - lam) * values[0, 1:9], values[0, 9])
    np.testing.assert_allclose(got.returns[0], targets[:9], atol=1e-5)
    # The paper multiplies its advantages by the importance weights; here the loss does that.
    np.testing.assert_allclose(got.advantages[0], rewards[0] + gamma * behind - values[0, :9], atol=1e-5)
