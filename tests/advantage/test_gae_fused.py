from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.chunked import CHUNK_SIZE
from app.advantage.gae.estimate import generalized_advantages
from app.advantage.gae.fused import fused_gae_on_host
from app.advantage.gae.pallas_kernel import KERNELS
from app.advantage.gae.recurrence import Discounts, RecurrenceTerms, make_gae_rows, step_through_masked
from tests.advantage.gae_oracle import Case, oracle, random_case

DISCOUNTS = list(itertools.product((0.0, 0.5, 0.95, 0.99, 1.0), repeat=2))


def plain_case(rows: int, num_tokens: int) -> Case:
    return random_case(np.random.default_rng(num_tokens), (rows, num_tokens), masked=False, packed=False)


def plain_terms(case: Case, *, gamma: float, lam: float) -> RecurrenceTerms:
    rows = make_gae_rows(case.rewards, case.values, mask=None, ends=None, bootstrap=None)
    return step_through_masked(rows, Discounts.create(gamma, lam))


def assert_close(got, expected) -> None:
    limit = 1e-5 * max(1.0, float(np.abs(expected[0]).max(initial=0)))
    for one, truth in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, truth, rtol=0, atol=limit)


@pytest.mark.parametrize("num_tokens", [1, 15, 17, 127, 128, 129, 511, 1024, 1100, 4096])
def test_blocks_on_the_host_equal_a_float64_loop(num_tokens):
    case = plain_case(3, num_tokens)
    for gamma, lam in DISCOUNTS:
        got = fused_gae_on_host(case.rewards, case.values[:, :-1], case.values[:, -1], gamma, lam)
        assert_close(got, oracle(case, gamma=gamma, lam=lam))


@pytest.mark.parametrize("shape", [(19, 65_537), (300, 1024), (131, 1000), (3, 65_536), (2, 131_072)])
def test_blocks_on_the_host_equal_a_float64_loop_where_there_are_many(shape):
    case = plain_case(*shape)
    got = fused_gae_on_host(case.rewards, case.values[:, :-1], case.values[:, -1], 0.99, 0.95)
    rows = [0, shape[0] // 2, shape[0] - 1]
    few = Case(case.rewards[rows], case.values[rows])
    assert_close([x[rows] for x in got], oracle(few, gamma=0.99, lam=0.95))


def test_blocks_on_the_host_promote_bfloat16():
    case = plain_case(2, 300)
    rounded = Case(*(np.asarray(jnp.asarray(x, jnp.bfloat16)) for x in case[:2]))
    advantages, returns = fused_gae_on_host(rounded.rewards, rounded.values[:, :-1], rounded.values[:, -1], 0.99, 0.95)
    assert advantages.dtype == returns.dtype == np.float32
    exact = Case(*(x.astype(np.float32) for x in rounded[:2]))
    assert_close((advantages, returns), oracle(exact, gamma=0.99, lam=0.95))


def test_blocks_on_the_host_read_arrays_of_any_layout():
    case = plain_case(70, 1024)
    by_time = Case(*(np.asfortranarray(x) for x in case[:2]))
    got = fused_gae_on_host(by_time.rewards, by_time.values[:, :-1], by_time.values[:, -1], 0.99, 0.95)
    assert_close(got, oracle(case, gamma=0.99, lam=0.95))


def test_blocks_on_the_host_hand_on_long_sums_exactly():
    rewards = np.ones((1, 131_072), np.float32)
    advantages, returns = fused_gae_on_host(rewards, 0 * rewards, np.zeros(1), 1.0, 1.0)
    np.testing.assert_array_equal(advantages[0], np.arange(131_072, 0, -1))
    np.testing.assert_array_equal(returns, advantages)


@pytest.mark.parametrize("shape", [(0, 5), (3, 0), (0, 0)])
def test_blocks_on_the_host_of_nothing_are_nothing(shape):
    advantages, returns = fused_gae_on_host(np.zeros(shape), np.zeros(shape), np.zeros(shape[0]), 0.9, 0.9)
    assert advantages.shape == returns.shape == shape


def test_blocks_on_the_host_leave_what_they_read_alone():
    case = plain_case(2, 300)
    before = case.rewards.copy(), case.values.copy()
    fused_gae_on_host(case.rewards, case.values[:, :-1], case.values[:, -1], 0.99, 0.95)
    np.testing.assert_array_equal(case.rewards, before[0])
    np.testing.assert_array_equal(case.values, before[1])


@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("num_tokens", [1, 129, 511, 17_000])
def test_kernels_equal_a_float64_loop(platform, num_tokens):
    case = plain_case(2, num_tokens)
    kernel = jax.jit(lambda terms: KERNELS[platform](terms, interpret=True))
    for gamma, lam in ((0.99, 0.95), (1.0, 1.0), (0.0, 0.5), (0.5, 1.0)):
        assert_close(kernel(plain_terms(case, gamma=gamma, lam=lam)), oracle(case, gamma=gamma, lam=lam))


@pytest.mark.parametrize(("platform", "lowered_for"), [("gpu", "cuda"), ("tpu", "tpu")])
@pytest.mark.parametrize("num_tokens", [100, 131_072])
def test_kernels_are_lowered_for_their_platform(platform, lowered_for, num_tokens):
    terms = plain_terms(plain_case(1, num_tokens), gamma=0.99, lam=0.95)
    program = jax.jit(KERNELS[platform]).trace(terms).lower(lowering_platforms=(lowered_for,)).as_text()
    assert {"gpu": "triton", "tpu": "tpu_custom_call"}[platform] in program


def test_fused_in_a_compiled_program_equals_fused_on_the_host():
    case = plain_case(2, 300)
    host = generalized_advantages(case.rewards, case.values, gamma=0.99, lam=0.95, backend="fused")
    compiled = jax.jit(lambda r, v: generalized_advantages(r, v, gamma=0.99, lam=0.95, backend="fused"))
    assert isinstance(host.advantages, np.ndarray)
    assert_close(compiled(case.rewards, case.values), host)


def test_a_choice_names_what_runs_and_why():
    auto = choose_backend("auto", (16, 8192), constant_decay=True)
    assert auto.backend == "fused" and auto.on_host and "CPU" in auto.reason
    assert choose_backend("auto", (16, 8192), constant_decay=True, traced=True).backend == "chunked"
    assert choose_backend("auto", (8192, 64), constant_decay=True)[:2] == ("chunked", 64)
    assert choose_backend("serial", (16, 8192), constant_decay=True, chunk_size=64) == (
        "serial",
        None,
        "requested",
        False,
    )
    assert choose_backend("chunked", (16, 8192), constant_decay=True, chunk_size=64)[:3] == ("chunked", 64, "requested")
    assert choose_backend("chunked", (16, 8192), constant_decay=True).chunk_size == CHUNK_SIZE


def test_a_choice_says_that_fused_has_no_form_for_masks():
    choice = choose_backend("fused", (16, 8192), constant_decay=False)
    assert choice.backend == "chunked" and not choice.on_host and "masks" in choice.reason
    auto = choose_backend("auto", (16, 8192), constant_decay=False)
    assert auto.backend == "serial" and auto.chunk_size is None and "masks" in auto.reason
