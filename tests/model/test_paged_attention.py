"""Tests attention over blocks, in XLA and by the kernels, compared with attention over whole caches."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.model.attention.cached import attend_in_xla
from app.model.attention.dense import DEFAULT_SCORE_MOD, dot_product_attention
from app.model.kernels import gpu_decode, tpu_decode
from app.model.kv_cache import LayerCache, to_codes
from tests.layouts import RULES

pytestmark = pytest.mark.usefixtures("interpreted")

ROWS, KV_HEADS, GROUP, HEAD = 5, 2, 3, 8
BLOCK, WIDTH = 16, 4
WAYS = ("xla", "tpu", "gpu")


@functools.cache
def compiled(rule, window: int | None, way: str, block_size: int = BLOCK):
    if way == "whole":
        return jax.jit(functools.partial(attend_whole, rule, window))
    if way == "xla":
        return jax.jit(functools.partial(attend_in_xla, rule, window))
    if way == "gpu":
        return jax.jit(functools.partial(gpu_decode.attend, rule, window, block_size // 2))
    return jax.jit(functools.partial(tpu_decode.attend, rule, window, block_size))


def attend_whole(rule, window: int | None, query, new: LayerCache, cache: LayerCache, positions, active):
    """Writes the new tokens into contiguous caches and applies dense attention, as the oracle."""
    write = jax.vmap(lambda row, token, position: row.at[:, position].set(token[:, 0]))
    keys, values = (write(x, y, positions) for x, y in zip(cache[:2], new[:2], strict=True))
    token = jnp.arange(keys.shape[2])
    visible = token <= positions[:, None]
    if window is not None:
        visible &= token > positions[:, None] - window
    return dot_product_attention(query, keys, values, visible[:, None], rule), LayerCache(keys, values)


def in_one_piece(pools: LayerCache, tables: np.ndarray) -> LayerCache:
    return jax.tree.map(lambda x: np.moveaxis(x[tables], 1, 2).reshape(ROWS, KV_HEADS, -1, *x.shape[3:]), pools)


def random_arrays(rng: np.random.Generator, block_size: int = BLOCK) -> tuple[np.ndarray, LayerCache, LayerCache]:
    """Returns queries, their keys and values, and pools with `WIDTH` blocks per row and one more."""
    normal = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    query, new = normal(ROWS, 1, KV_HEADS * GROUP, HEAD), LayerCache(*normal(2, ROWS, KV_HEADS, 1, HEAD))
    return query, new, LayerCache(*normal(2, 1 + ROWS * WIDTH, KV_HEADS, block_size, HEAD))


def assert_equal_attention(
    way: str, positions: list[int], *, active=(True,) * ROWS, window=None, rule=DEFAULT_SCORE_MOD, seed: int = 0
) -> None:
    """Asserts that rows with scattered blocks have the attention and the caches of contiguous rows."""
    rng = np.random.default_rng(seed)
    query, new, pools = random_arrays(rng)
    tables = 1 + rng.permutation(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(np.int32)
    # A row has only the blocks that its tokens need.
    tables = np.where(np.arange(WIDTH) <= np.asarray(positions)[:, None] // BLOCK, tables, 0)
    at, is_active = np.array(positions, np.int32), np.array(active)
    expected_mixed, whole = compiled(rule, window, "whole")(query, new, in_one_piece(pools, tables), at, is_active)
    mixed, written_pools = compiled(rule, window, way)(query, new, pools, at, is_active, tables)
    np.testing.assert_allclose(mixed[is_active], expected_mixed[is_active], atol=1e-5)
    written = {tables[row, position // BLOCK] for row, position in enumerate(positions) if is_active[row]}
    for ours, old, right in zip(written_pools[:2], pools[:2], whole[:2], strict=True):
        for row in np.flatnonzero(is_active):
            for j in range(positions[row] // BLOCK + 1):
                seen = slice(0, min(BLOCK, positions[row] + 1 - j * BLOCK))
                theirs = right[row, :, j * BLOCK : (j + 1) * BLOCK][:, seen]
                np.testing.assert_array_equal(ours[tables[row, j]][:, seen], theirs)
        for place in set(range(1, len(old))) - written:
            if is_active.any():
                np.testing.assert_array_equal(ours[place], old[place])


@pytest.mark.parametrize("way", WAYS)
def test_paged_attention_equals_attention_over_a_contiguous_cache(way: str) -> None:
    for positions in ([0, 15, 16, 17, 63], [31, 32, 33, 47, 48]):
        for rule, window in ((RULES[0], 20), (RULES[1], 1)):
            assert_equal_attention(way, positions, window=window, rule=rule)


@pytest.mark.parametrize("way", WAYS)
@given(data=st.data())
@settings(max_examples=12)
def test_inactive_rows_do_not_change_cache_blocks(way: str, data: st.DataObject) -> None:
    positions = data.draw(st.lists(st.integers(0, BLOCK * WIDTH - 1), min_size=ROWS, max_size=ROWS))
    active = data.draw(st.lists(st.booleans(), min_size=ROWS, max_size=ROWS))
    window = data.draw(st.sampled_from([None, 20]))
    assert_equal_attention(way, positions, active=active, window=window, seed=data.draw(st.integers(0, 99)))


def test_tpu_decode_kernel_reads_only_live_blocks() -> None:
    query, new, pools = random_arrays(np.random.default_rng(0))
    tables = 1 + np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
    positions = np.array([3, 20, 31, 32, 50], np.int32)
    given = positions, np.ones(ROWS, bool), tables
    attend = compiled(DEFAULT_SCORE_MOD, None, "tpu")
    before = attend(query, new, pools, *given)[0]
    for row, position in enumerate(positions):
        for pool in pools[:2]:
            pool[tables[row, max(position - 1, 0) // BLOCK + 1 :]] = np.nan
    np.testing.assert_array_equal(attend(query, new, pools, *given)[0], before)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("block_size", "window"), [(16, None), (64, 20)])
def test_attention_over_an_int8_cache_equals_attention_over_its_dequantized_values(
    way: str, block_size: int, window: int | None
) -> None:
    """Blocks have one tile of codes or several."""
    rng = np.random.default_rng(0)
    query, new, pools = random_arrays(rng, block_size)
    tables = 1 + rng.permutation(ROWS * WIDTH).reshape(ROWS, WIDTH).astype(np.int32)
    last = WIDTH * block_size - 1
    positions, active = np.array([0, 31, 32, last // 2, last], np.int32), np.array([True, True, True, True, False])
    codes, new_codes = to_codes(pools), to_codes(new)
    for exact, near in zip((pools.keys, pools.values), stood_for(codes)[:2], strict=True):
        assert np.abs(exact - near).max() <= np.abs(exact).max() / 254 + 1e-6
    rule = RULES[1]
    whole = in_one_piece(stood_for(codes), tables)
    expected, _ = compiled(rule, window, "whole")(query, stood_for(new_codes), whole, positions, active)
    mixed, written = compiled(rule, window, way, block_size)(query, new_codes, codes, positions, active, tables)
    np.testing.assert_allclose(mixed[active], expected[active], atol=1e-5)
    for row in np.flatnonzero(active):
        own, offset = tables[row, positions[row] // block_size], positions[row] % block_size
        for ours, old, added in zip(*map(jax.tree.leaves, (written, codes, new_codes)), strict=True):
            np.testing.assert_array_equal(ours[own, :, :offset], old[own, :, :offset])
            np.testing.assert_array_equal(ours[own, :, offset], added[row, :, 0])


def stood_for(cache: LayerCache) -> LayerCache:
    assert cache.key_scales is not None and cache.value_scales is not None
    return LayerCache(cache.keys * cache.key_scales[..., None], cache.values * cache.value_scales[..., None])
