from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.records.sample import Sample
from app.update.loss_aggregation import (
    StepTotals,
    aggregations,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_mean,
)
from tests.tiny import make_sample

LONGEST = 4
AGGREGATIONS = aggregations(max_new_tokens=LONGEST)
MASKS_OF_A_STEP = st.lists(st.lists(st.booleans(), max_size=6), max_size=6)


def masked(mask) -> Sample:
    mask = np.asarray(mask, bool)
    return make_sample(np.zeros(len(mask)), loss_mask=mask)


def aggregate(weights, losses, masks) -> float:
    samples = [masked(mask) for mask in masks]
    totals = StepTotals.from_samples(samples)
    return sum(float(weights(s, totals) @ np.asarray(row)) for s, row in zip(samples, losses, strict=True))


LOSSES, MASKS = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", (0.1 + 0.2 + 0.4 + 0.5 + 0.6) / 5),
        ("sequence-mean-token-mean", (0.3 / 2 + 1.5 / 3) / 2),
        ("sequence-mean-token-sum", (0.3 + 1.5) / 2),
        ("constant-length", (0.3 / 4 + 1.5 / 4) / 2),
    ],
)
def test_values_by_hand(name, expected):
    assert aggregate(AGGREGATIONS[name], LOSSES, MASKS) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("sequence-mean-token-mean", 2.0), ("sequence-mean-token-sum", 4.0), ("constant-length", 1.0)],
)
def test_a_sample_without_tokens_is_not_counted_among_the_sequences(name, expected):
    # 1 and 3 in the only sequence that there is.
    losses, masks = [[1.0, 3.0], [7.0, 7.0]], [[1, 1], [0, 0]]
    assert aggregate(AGGREGATIONS[name], losses, masks) == pytest.approx(expected)


def test_a_long_sample_outweighs_short_ones_only_by_tokens():
    # 10 tokens of loss 1 and three samples of two tokens of loss 0.
    losses, masks = [[1.0] * 10] + [[0.0] * 2] * 3, [[1] * 10] + [[1] * 2] * 3
    assert aggregate(token_mean, losses, masks) == pytest.approx(0.625)
    assert aggregate(sequence_mean_token_mean, losses, masks) == pytest.approx(0.25)
    assert aggregate(sequence_mean_token_sum, losses, masks) == pytest.approx(2.5)


@pytest.mark.parametrize("name", AGGREGATIONS)
@given(masks=MASKS_OF_A_STEP)
def test_weights_vanish_outside_the_mask_and_nowhere_else(name, masks):
    samples = [masked(mask) for mask in masks]
    totals = StepTotals.from_samples(samples)
    for sample in samples:
        weights = AGGREGATIONS[name](sample, totals)
        assert weights.dtype == np.float32
        np.testing.assert_array_equal(weights > 0, sample.mask)
