from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.model.attention.pairs import UNREACHABLE, BlockPairs, block_pairs
from app.model.segment_layout import SegmentLayout, attention_mask
from tests.layouts import layout_of, seen, segments_of_rows

SIZE = 4


def test_a_completion_sees_its_prompt_and_itself_and_no_sibling():
    layout = layout_of([[(2, (2, 1)), (1, (1,))]], num_tokens=8)
    expected = [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 0, 1, 0, 0, 0],
        [0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]
    np.testing.assert_array_equal(attention_mask(layout, layout, 0, None)[0], expected)


def test_a_window_counts_positions_and_not_the_siblings_between():
    layout = layout_of([[(2, (3, 1))]], num_tokens=6)
    # The last token stands at position 2: one after the prompt, however long its sibling.
    np.testing.assert_array_equal(attention_mask(layout, layout, 0, 2)[0, 5], [0, 1, 0, 0, 0, 1])


@given(segments_of_rows(num_rows=2, num_tokens=14, longest=6), st.sampled_from([None, 1, 2, 5]))
def test_visibility_equals_the_rule_one_pair_of_tokens_at_a_time(rows, window):
    layout = layout_of(rows, num_tokens=14)
    np.testing.assert_array_equal(attention_mask(layout, layout, 0, window), seen(layout, window))


@functools.cache
def pairs_function(windows: tuple[int | None, ...]):
    return jax.jit(lambda layout: block_pairs(layout, windows, SIZE))


def visited(pairs: BlockPairs, window: int | None) -> list[tuple[int, int]]:
    """Returns the part of the list that a layer with this window reads."""
    *blocks, num = pairs.inside(jnp.int32(UNREACHABLE if window is None else window))
    return list(zip(*(x[:num].tolist() for x in blocks), strict=True))


def needed(layout: SegmentLayout, window: int | None) -> list[tuple[int, int]]:
    """Returns the pairs of blocks with a visible entry, by looking at every entry."""
    entries = seen(layout, window)
    rows, num_tokens, _ = entries.shape
    blocks = num_tokens // SIZE
    some = entries.reshape(rows, blocks, SIZE, blocks, SIZE).any(axis=(2, 4))
    return [(row * blocks + query, row * blocks + key) for row, query, key in np.argwhere(some).tolist()]


@pytest.mark.parametrize("windows", [(None,), (3, None), (2, 7, None), (5,)])
@given(rows=segments_of_rows(num_rows=2, num_tokens=5 * SIZE, longest=12))
def test_exactly_the_pairs_of_blocks_with_a_visible_entry_are_visited_under_every_window(windows, rows):
    layout = layout_of(rows, num_tokens=5 * SIZE)
    pairs = pairs_function(windows)(layout)
    for window in windows:
        assert visited(pairs, window) == needed(layout, window)


def test_foreign_segments_sibling_completions_and_the_future_are_skipped():
    # Blocks of one row: 0-1 prompt, 2-3 its first completion, 4 its second, 5 another sample, 6 padding.
    layout = layout_of([[(8, (8, 4)), (1, (3,))]], num_tokens=7 * SIZE)
    pairs = pairs_function((None,))(layout)
    of_prompt = [(0, 0), (1, 0), (1, 1)]
    of_first = [(2, 0), (2, 1), (2, 2), (3, 0), (3, 1), (3, 2), (3, 3)]
    of_second = [(4, 0), (4, 1), (4, 4)]
    assert visited(pairs, None) == [*of_prompt, *of_first, *of_second, (5, 5)]


def test_rows_of_padding_are_not_visited_at_all():
    assert visited(pairs_function((None,))(layout_of([[], []], num_tokens=12)), None) == []
