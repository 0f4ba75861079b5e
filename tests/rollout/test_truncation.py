"""Tests that the search for thresholds keeps the tokens that a sort keeps, ties included, on every layout."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rollout.sampling import threshold_kernel, truncation
from app.rollout.sampling.threshold_codes import lowest_code, value_of_code
from app.rollout.sampling.token_sampling import SamplingRules, sample_tokens_truncated
from app.rollout.sampling.truncation import MASS_UNIT, kept_tokens, lowest_reached
from tests.tiny import make_mesh

VOCAB = 304
EXTREMES = [-np.inf, -3e38, -1.0, -1e-30, -0.0, 0.0, 1e-30, 1.0, 3e38]
RULES = [
    SamplingRules(1.0, *rule)
    for rule in [
        *[(k, 1.0, 0.0) for k in (1, 2, 17, VOCAB - 1, VOCAB, VOCAB + 5)],
        *[(0, p, 0.0) for p in (1e-6, 0.3, 0.95, 0.999999)],
        *[(0, 1.0, p) for p in (1e-4, 0.5, 1.0)],
        *[(20, 0.5, 0.0), (5, 0.9, 0.2), (40, 0.95, 0.01)],
    ]
]


def rows(num_rows: int = 8, *, seed: int = 0) -> np.ndarray:
    """Returns logits, half of the rows with many equal ones."""
    logits = np.random.default_rng(seed).normal(size=(num_rows, VOCAB)) * 3
    logits[::2] = np.round(logits[::2])
    return logits.astype(np.float32)


def sorted_oracle(logits: np.ndarray, probabilities: np.ndarray, rules: SamplingRules) -> np.ndarray:
    order = np.argsort(-logits, axis=-1, kind="stable")
    ranked = np.take_along_axis(probabilities, order, axis=-1)
    units = np.int64(np.round(ranked / MASS_UNIT))
    kept = np.ones(logits.shape, bool)
    if rules.top_k:
        kept &= np.arange(logits.shape[1]) < rules.top_k
    if rules.top_p < 1:
        limits = np.ceil(np.float32(rules.top_p) * np.float32(np.where(kept, units, 0).sum(axis=-1, keepdims=True)))
        kept &= np.cumsum(units, axis=-1) - units < np.maximum(limits, 1)
    kept &= ranked >= np.float32(rules.min_p) * ranked[:, :1]
    back = np.empty_like(kept)
    np.put_along_axis(back, order, kept, axis=-1)
    return back


@functools.cache
def compiled():
    return jax.jit(lambda logits, rules: (kept_tokens(logits, jax.nn.softmax(logits), *rules), jax.nn.softmax(logits)))


@pytest.mark.parametrize("rules", RULES, ids=lambda rules: "-".join(map(str, rules[1:])))
def test_a_search_keeps_what_a_sort_keeps_to_the_token(rules: SamplingRules) -> None:
    logits = rows()
    kept, probabilities = map(np.asarray, compiled()(logits, tuple(map(jnp.asarray, rules[1:]))))
    np.testing.assert_array_equal(kept, sorted_oracle(logits, probabilities, rules))
    assert kept.any(axis=-1).all()


def slow_lowest(values: np.ndarray, weights: np.ndarray, limit: int) -> float:
    """Returns the lowest value with less than the limit above it, or minus infinity if all have."""
    if weights.sum() < limit:
        return -np.inf if values.dtype == np.float32 else 0
    return min(value for value in values if weights[values > value].sum() < limit)


def searches(values: np.ndarray, weights: np.ndarray | None, limits: np.ndarray, num_bits: int) -> list[np.ndarray]:
    """Returns the results for one and for four bits a pass, and of the kernel in Pallas' interpreter."""
    run = functools.partial(truncation._search, num_bits=num_bits)  # pyright: ignore[reportPrivateUsage]
    kernel = functools.partial(threshold_kernel.search, num_bits=num_bits, available_bytes=2**24)
    ways = [functools.partial(run, bits_per_pass=bits) for bits in (1, 4)] + [kernel]
    return [np.asarray(value_of_code(jax.jit(way)(values, weights, limits), values.dtype)) for way in ways]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("weighs", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_every_way_of_searching_finds_the_same_value(dtype: type, weighs: bool) -> None:
    rng = np.random.default_rng(3)
    values = rows(11) if dtype == np.float32 else rng.integers(0, 40, (11, VOCAB)).astype(dtype)
    if dtype == np.float32:
        values[1:4, : len(EXTREMES)] = EXTREMES
        values[4] = -np.inf
    weights = rng.integers(0, 1000, values.shape).astype(np.int32) if weighs else None
    held = np.ones_like(values, np.int32) if weights is None else weights
    limits = np.array([1, 2, 50, 303, 304, 305, 10**6, 7, 30, 100, 200], np.int32)
    expected = [slow_lowest(*row) for row in zip(values, held, limits, strict=True)]
    for found in searches(values, weights, limits, 32 if dtype == np.float32 else 6):
        np.testing.assert_array_equal(found, expected)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_subnormal=False), min_size=2, max_size=20))
def test_codes_have_the_order_of_their_numbers(numbers: list[float]) -> None:
    values = np.sort(np.asarray(numbers, np.float32))
    bits = values.view(np.int32)
    codes = np.where(bits < 0, bits ^ np.iinfo(np.int32).max, bits)
    assert ((codes[:-1] < codes[1:]) | (values[:-1] == values[1:])).all()
    np.testing.assert_array_equal(value_of_code(jnp.asarray(codes), np.float32), values)


def test_no_code_is_no_number_that_others_could_be_above() -> None:
    lowest = jnp.int32(lowest_code(jnp.float32))
    assert value_of_code(lowest, jnp.float32) == -np.inf


def test_blocks_fit_the_memory_on_each_chip() -> None:
    v4, v5e = 16 * 2**20, 96 * 2**20
    assert [threshold_kernel.num_buffers(151_936, size) for size in (v4, v5e)] == [1, 2]
    assert threshold_kernel.num_buffers(262_144, v4) == 0


@pytest.mark.parametrize("shape", [(8, 1, 1), (2, 2, 2), (1, 1, 8)])
def test_every_layout_draws_the_same_tokens(shape: tuple[int, int, int]) -> None:
    # Sixteen rows are shared out among all devices, twelve only among those that share no weights.
    for num_rows in (16, 12) if shape == (2, 2, 2) else (16,):
        assert_same_draws(shape, num_rows)


def assert_same_draws(shape: tuple[int, int, int], num_rows: int) -> None:
    logits, rules = rows(num_rows), SamplingRules(1.0, 20, 0.9, 0.01)
    keys = jax.random.split(jax.random.key(0), num_rows)
    alone = jax.jit(sample_tokens_truncated)(logits, rules, keys)
    mesh = make_mesh(shape)
    split = jax.sharding.NamedSharding(mesh, jax.P(("dp", "fsdp"), "tp"))
    with jax.set_mesh(mesh):
        drawn = jax.jit(sample_tokens_truncated)(jax.device_put(logits, split), rules, keys)
    np.testing.assert_array_equal(drawn.token_ids, alone.token_ids)
    np.testing.assert_allclose(drawn.kept_mass_logs, alone.kept_mass_logs, atol=1e-6)


def test_a_row_that_is_no_number_harms_no_other() -> None:
    logits = rows(4)
    logits[1, 5], logits[2, 6] = np.nan, np.inf
    keys, rules = jax.random.split(jax.random.key(0), 4), SamplingRules(1.0, 20, 0.9, 0.01)
    drawn = jax.jit(sample_tokens_truncated)(logits, rules, keys)
    np.testing.assert_array_equal(np.isfinite(drawn.logprobs), [True, False, False, True])
    others = jax.jit(sample_tokens_truncated)(rows(4), rules, keys)
    np.testing.assert_array_equal(drawn.token_ids[jnp.array([0, 3])], others.token_ids[jnp.array([0, 3])])


def test_the_search_takes_as_many_passes_as_a_number_has_bits() -> None:
    program = jax.jit(lowest_reached).lower(rows(), None, jnp.ones(8, jnp.int32)).as_text()
    assert "sort" not in program and "dense<32> : tensor<i32>" in program
