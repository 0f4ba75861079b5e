from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.batching.pack import RowShape, pack_per_token, pack_tokens, unpack_per_token
from app.batching.plan import Plan
from app.flow import Sample
from tests.tiny import make_sample, random_samples

TWO = [
    make_sample([20, 21, 22], prompt_ids=[10, 11], loss_mask=np.array([True, False, True])),
    make_sample([40], prompt_ids=[30, 31, 32]),
]


def test_a_row_of_two_samples_by_hand():
    batch = pack_tokens(TWO, Plan(((0, 1),), 1), RowShape(num_tokens=11, num_completion_tokens=6))
    np.testing.assert_array_equal(batch.token_ids, [[[10, 11, 20, 21, 22, 30, 31, 32, 40, 0, 0]]])
    np.testing.assert_array_equal(batch.positions, [[[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 0]]])
    np.testing.assert_array_equal(batch.segment_ids, [[[1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0]]])
    np.testing.assert_array_equal(batch.score_index, [[[1, 2, 3, 7, -1, -1]]])
    np.testing.assert_array_equal(batch.targets, [[[20, 21, 22, 40, 0, 0]]])
    np.testing.assert_array_equal(batch.mask, [[[True, False, True, True, False, False]]])


def test_every_target_stands_one_token_after_its_score_index():
    batch = pack_tokens(TWO, Plan(((1, 0), ()), 1), RowShape(num_tokens=9, num_completion_tokens=4))
    row, index = batch.token_ids[0, 0], batch.score_index[0, 0]
    np.testing.assert_array_equal(row[index + 1], batch.targets[0, 0])


def test_empty_rows_are_padding_throughout():
    batch = pack_tokens(TWO, Plan(((0,), (1,), (), ()), 2), RowShape(num_tokens=6, num_completion_tokens=3))
    assert batch.token_ids.shape == (2, 2, 6)
    assert batch.targets.shape == (2, 2, 3)
    assert not batch.segment_ids[1].any()
    assert not batch.mask[1].any()


def test_per_token_values_lie_beside_their_targets():
    plan, shape = Plan(((1, 0), ()), 2), RowShape(num_tokens=9, num_completion_tokens=5)
    packed = pack_per_token(TWO, plan, shape, lambda s: s.completion_ids.astype(np.float32))
    np.testing.assert_array_equal(packed, [[[40, 20, 21, 22, 0], [0] * 5]])
    np.testing.assert_array_equal(packed, pack_tokens(TWO, plan, shape).targets)


def test_a_row_that_cannot_hold_its_samples_is_an_error():
    with pytest.raises(ValueError, match="broadcast"):
        pack_tokens(TWO, Plan(((0, 1),), 1), RowShape(num_tokens=8, num_completion_tokens=6))


@st.composite
def packings(draw) -> tuple[list[Sample], Plan, RowShape]:
    """Samples over rows of any number of them, in any order, with empty rows between."""
    samples = random_samples(
        draw(st.integers(1, 3)),
        draw(st.integers(1, 4)),
        vocab_size=97,
        with_holes=True,
        seed=draw(st.integers(0, 999)),
    )
    row_of = draw(st.lists(st.integers(0, 5), min_size=len(samples), max_size=len(samples)))
    order = draw(st.permutations(range(len(samples))))
    rows = [[i for i in order if row_of[i] == row] for row in range(max(row_of) + 1)]
    rows_per_micro_batch = draw(st.integers(1, 3))
    rows += [[]] * (-len(rows) % rows_per_micro_batch)
    longest = max(sum(len(samples[i].prompt.token_ids) + len(samples[i].completion_ids) for i in r) for r in rows)
    most = max(sum(len(samples[i].completion_ids) for i in r) for r in rows)
    shape = RowShape(longest + draw(st.integers(0, 5)), most + draw(st.integers(0, 5)))
    return samples, Plan(tuple(map(tuple, rows)), rows_per_micro_batch), shape


@given(packings())
def test_unpacking_undoes_packing(packing):
    samples, plan, shape = packing
    packed = pack_per_token(samples, plan, shape, lambda s: s.behavior_logprobs)
    for sample, values in zip(samples, unpack_per_token(packed, samples, plan), strict=True):
        np.testing.assert_array_equal(values, sample.behavior_logprobs)


@given(packings())
def test_packed_rows_hold_every_sample_whole_and_nothing_else(packing):
    samples, plan, shape = packing
    batch = pack_tokens(samples, plan, shape)
    assert batch.segment_ids.astype(bool).sum() == sum(len(s.prompt.token_ids) + len(s.completion_ids) for s in samples)
    assert batch.mask.sum() == sum(s.mask.sum() for s in samples)
    flat = [x.reshape(-1, x.shape[-1]) for x in (batch.token_ids, batch.positions, batch.segment_ids)]
    for row, members in enumerate(plan.rows):
        for segment, i in enumerate(members, start=1):
            token_ids, positions, _ = (x[row][flat[2][row] == segment] for x in flat)
            expected = np.concatenate([samples[i].prompt.token_ids, samples[i].completion_ids])
            np.testing.assert_array_equal(token_ids, expected)
            np.testing.assert_array_equal(positions, np.arange(len(expected)))
