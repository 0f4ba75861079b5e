"""Tests of the TPU's decode kernel in Pallas' interpreter, compared with XLA's attention over the whole cache."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model.attention.cached import extend_cache
from app.model.attention.dense import DEFAULT_SCORE_MOD
from app.model.kernels import tpu_decode
from app.model.kernels.tpu_decode import TILE
from app.model.kv_cache import LayerCache
from tests.model.test_block_attention import RULES

ROWS, KV_HEADS, GROUP, HEAD = 5, 2, 3, 8


@functools.cache
def compiled(rule, window: int | None, block_size: int | None):
    if block_size is None:
        return jax.jit(
            lambda query, key, value, keys, values, *rows: extend_cache(
                query, key, value, LayerCache(keys, values), *rows, window=window, score_mod=rule
            )
        )
    attend = functools.partial(tpu_decode.attend, rule, window, block_size, interpret=True)
    return jax.jit(
        lambda query, key, value, keys, values, *rows: attend(
            query, LayerCache(key, value), LayerCache(keys, values), *rows
        )
    )


def arrays(cache_length: int, *, seed: int = 0) -> list[np.ndarray]:
    """Returns query, key, value, keys and values."""
    rng = np.random.default_rng(seed)
    new, cache = (ROWS, KV_HEADS, 1, HEAD), (ROWS, KV_HEADS, cache_length, HEAD)
    shapes = ((ROWS, 1, KV_HEADS * GROUP, HEAD), new, new, cache, cache)
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def assert_equal_attention(
    positions: list[int],
    *,
    cache_length: int,
    block_size: int,
    active=(True,) * ROWS,
    window=None,
    rule=DEFAULT_SCORE_MOD,
) -> None:
    """Asserts that active rows get XLA's attention and caches, and that nothing else that is read has changed."""
    inputs, at, is_active = arrays(cache_length), np.array(positions, np.int32), np.array(active)
    expected = compiled(rule, window, None)(*inputs, at, is_active)
    mixed, cache = compiled(rule, window, block_size)(*inputs, at, is_active)
    np.testing.assert_allclose(mixed[is_active], expected[0][is_active], atol=1e-5)
    np.testing.assert_array_equal(mixed[~is_active], 0)
    for new, old, right in zip(cache[:2], inputs[3:], expected[1][:2], strict=True):
        for row, position in enumerate(positions):
            if is_active[row]:
                seen = np.s_[row, :, : position + 1]
                np.testing.assert_array_equal(new[seen], right[seen])
                beyond = np.s_[row, :, (position // TILE + 1) * TILE :]
                np.testing.assert_array_equal(new[beyond], old[beyond])
            else:
                # Without any active row, the first one is visited: a grid has a turn.
                at_end = min(position, cache_length - 1)
                kept = at_end if row == 0 and not is_active.any() else cache_length
                np.testing.assert_array_equal(new[row, :, :kept], old[row, :, :kept])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [None, 1, 2, 20, 1000])
def test_the_kernel_equals_attention_over_the_whole_cache(rule, window) -> None:
    for positions in ([0, 15, 16, 17, 95], [31, 32, 33, 47, 64]):
        assert_equal_attention(positions, cache_length=96, block_size=32, window=window, rule=rule)


@pytest.mark.parametrize(
    ("cache_length", "block_size"), [(96, 96), (100, 32), (100, 96), (104, 96), (12, 12), (40, 16)]
)
def test_a_cache_of_any_length(cache_length: int, block_size: int) -> None:
    if cache_length % block_size and jax.__version_info__ >= (0, 11):
        pytest.skip("the interpreter of JAX 0.11 does not pad arrays that are updated in place; the compiler does")
    last = cache_length - 1
    assert_equal_attention([0, 1, last // 2, last - 1, last], cache_length=cache_length, block_size=block_size)


@pytest.mark.parametrize("active", [(False, True, False, True, True), (True, False, False, False, False), (False,) * 5])
def test_rows_that_are_not_active_are_neither_read_nor_written(active) -> None:
    assert_equal_attention([3, 40, 17, 63, 0], cache_length=64, block_size=16, active=active)


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 79), min_size=ROWS, max_size=ROWS),
    st.sampled_from([None, 3, 16, 33]),
    st.lists(st.booleans(), min_size=ROWS, max_size=ROWS),
)
def test_random_positions_windows_and_rows(positions, window, active) -> None:
    assert_equal_attention(positions, cache_length=80, block_size=16, window=window, active=active)


def test_a_stopped_row_at_the_end_of_its_cache_harms_no_other() -> None:
    for position in (63, 64):
        assert_equal_attention([position, 40, 17, 63, 0], cache_length=64, block_size=16, active=(False,) * ROWS)


def test_a_block_beyond_the_live_ones_is_never_looked_at() -> None:
    inputs, positions, active = arrays(96), np.array([3, 20, 31, 32, 50], np.int32), np.ones(ROWS, bool)
    before = compiled(DEFAULT_SCORE_MOD, None, 32)(*inputs, positions, active)[0]
    for row, position in enumerate(positions):
        for cache in inputs[3:]:
            cache[row, :, (max(position - 1, 0) // 32 + 1) * 32 :] = np.nan
    after = compiled(DEFAULT_SCORE_MOD, None, 32)(*inputs, positions, active)[0]
    np.testing.assert_array_equal(after, before)


def test_as_many_turns_as_blocks_with_tokens() -> None:
    live = functools.partial(tpu_decode._live_blocks, block_size=32, blocks_per_row=3)  # pyright: ignore
    positions, visited = jnp.array([0, 32, 33, 95]), jnp.array([True, True, True, False])
    rows, blocks, count = live(positions, visited, None)
    assert (int(count), rows[:4].tolist(), blocks[:4].tolist()) == (4, [0, 1, 2, 2], [0, 0, 0, 1])
    rows, blocks, count = live(positions, jnp.ones(4, bool), 40)
    assert (int(count), rows[:6].tolist(), blocks[:6].tolist()) == (6, [0, 1, 2, 2, 3, 3], [0, 0, 0, 1, 1, 2])
