"""Tests of attention over blocks, in XLA and by the kernels, compared with attention over whole caches."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model import decode_attention_kernel, gpu_decode_kernel, paged_attention
from app.model.cache_attention import extend_cache
from app.model.score_mod import DEFAULT_SCORE_MOD
from tests.model.test_block_attention import RULES

ROWS, KV_HEADS, GROUP, HEAD = 5, 2, 3, 8
BLOCK, WIDTH = 16, 4
WAYS = ("xla", "tpu", "gpu")


@functools.cache
def compiled(rule, window: int | None, way: str):
    if way == "whole":
        return jax.jit(functools.partial(extend_cache, window=window, score_mod=rule))
    if way == "xla":
        return jax.jit(functools.partial(paged_attention.attend, rule, window))
    if way == "gpu":
        return jax.jit(functools.partial(gpu_decode_kernel.attend, rule, window, BLOCK // 2, interpret=True))
    return jax.jit(functools.partial(decode_attention_kernel.attend, rule, window, BLOCK, interpret=True))


def assert_equal_attention(
    way: str, positions: list[int], *, active=(True,) * ROWS, window=None, rule=DEFAULT_SCORE_MOD, seed: int = 0
) -> None:
    """Asserts that rows whose blocks lie anywhere get the attention and the caches of rows that lie in one piece."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    new = normal(ROWS, 1, KV_HEADS * GROUP, HEAD), normal(ROWS, KV_HEADS, 1, HEAD), normal(ROWS, KV_HEADS, 1, HEAD)
    pools = [normal(1 + ROWS * WIDTH, KV_HEADS, BLOCK, HEAD) for _ in range(2)]
    tables = 1 + rng.permutation(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(np.int32)
    # A row needs no more blocks than it has tokens.
    tables = np.where(np.arange(WIDTH) <= np.asarray(positions)[:, None] // BLOCK, tables, 0)
    whole = [np.moveaxis(pool[tables], 1, 2).reshape(ROWS, KV_HEADS, WIDTH * BLOCK, HEAD) for pool in pools]
    at, is_active = np.array(positions, np.int32), np.array(active)
    expected = compiled(rule, window, "whole")(*new, *whole, at, is_active)
    mixed, *caches = compiled(rule, window, way)(*new, *pools, at, is_active, tables)
    np.testing.assert_allclose(mixed[is_active], expected[0][is_active], atol=1e-5)
    written = {tables[row, position // BLOCK] for row, position in enumerate(positions) if is_active[row]}
    for ours, old, right in zip(caches, pools, expected[1:], strict=True):
        for row in np.flatnonzero(is_active):
            for j in range(positions[row] // BLOCK + 1):
                seen = slice(0, min(BLOCK, positions[row] + 1 - j * BLOCK))
                theirs = right[row, :, j * BLOCK : (j + 1) * BLOCK][:, seen]
                np.testing.assert_array_equal(ours[tables[row, j]][:, seen], theirs)
        for place in set(range(1, len(old))) - written:
            if is_active.any():
                np.testing.assert_array_equal(ours[place], old[place])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("window", [None, 1, 20, 1000])
def test_blocks_anywhere_equal_a_cache_in_one_piece(way: str, rule, window: int | None) -> None:
    for positions in ([0, 15, 16, 17, 63], [31, 32, 33, 47, 48]):
        assert_equal_attention(way, positions, window=window, rule=rule)


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=15)
def test_rows_that_are_not_active_change_nothing(way: str, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, BLOCK * WIDTH - 1), min_size=ROWS, max_size=ROWS))
    active = data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    window = data.draw(st.sampled_from([None, 3, 24]))
    assert_equal_attention(way, positions, active=active, window=window, seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("window", [None, 20])
def test_a_longer_neighbour_changes_no_bit_of_a_row(window: int | None) -> None:
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    new = normal(2, 1, KV_HEADS * GROUP, HEAD), normal(2, KV_HEADS, 1, HEAD), normal(2, KV_HEADS, 1, HEAD)
    pools = [normal(9, KV_HEADS, BLOCK, HEAD) for _ in range(2)]
    tables = np.array([[1, 2, 0, 0], [3, 4, 5, 6]], np.int32)
    attend = compiled(DEFAULT_SCORE_MOD, window, "xla")
    for active in ([True, True], [True, False]):
        found = [attend(*new, *pools, np.array([25, at], np.int32), np.array(active), tables)[0] for at in (2, 40, 63)]
        np.testing.assert_array_equal(found[0][0], found[1][0])
        np.testing.assert_array_equal(found[0][0], found[2][0])
