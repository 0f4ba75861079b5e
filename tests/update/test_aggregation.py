from __future__ import annotations

import numpy as np
import pytest

from app.flow import Sample
from app.update.aggregation import AGGREGATIONS, Totals, sequence_mean_token_mean, token_mean
from tests.tiny import make_sample


def masked(mask) -> Sample:
    mask = np.asarray(mask, bool)
    return make_sample(np.zeros(len(mask)), loss_mask=mask)


def aggregate(weights, losses, masks) -> float:
    samples = [masked(mask) for mask in masks]
    totals = Totals.of(samples)
    return sum(float(weights(s, totals) @ np.asarray(row)) for s, row in zip(samples, losses, strict=True))


LOSSES, MASKS = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]], [[1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize(("weights", "expected"), [(token_mean, 0.36), (sequence_mean_token_mean, 0.325)])
def test_values_by_hand(weights, expected):
    # Tokens: (.1 + .2 + .4 + .5 + .6) / 5. Sequences: (.3 / 2 + 1.5 / 3) / 2.
    assert aggregate(weights, LOSSES, MASKS) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("weights", AGGREGATIONS.values())
def test_a_batch_without_a_single_token_costs_nothing(weights):
    assert aggregate(weights, LOSSES, [[0, 0, 0], [0, 0, 0]]) == 0.0


def test_a_sample_without_tokens_is_not_counted_among_the_sequences():
    # (1 + 3) / 2 is the only sequence mean there is.
    assert aggregate(sequence_mean_token_mean, [[1.0, 3.0], [7.0, 7.0]], [[1, 1], [0, 0]]) == pytest.approx(2.0)


def test_a_long_sample_outweighs_short_ones_only_by_tokens():
    # 10 tokens of loss 1 and three samples of two tokens of loss 0.
    losses, masks = [[1.0] * 10] + [[0.0] * 2] * 3, [[1] * 10] + [[1] * 2] * 3
    assert aggregate(token_mean, losses, masks) == pytest.approx(0.625)
    assert aggregate(sequence_mean_token_mean, losses, masks) == pytest.approx(0.25)


@pytest.mark.parametrize("weights", AGGREGATIONS.values())
def test_weights_of_a_step_sum_to_one_and_vanish_outside_the_mask(weights):
    samples = [masked([1, 0, 1, 1]), masked([0]), masked([1])]
    totals = Totals.of(samples)
    assert totals == Totals(num_tokens=4, num_samples=2)
    assert sum(float(weights(s, totals).sum()) for s in samples) == pytest.approx(1.0)
    assert all(np.all(weights(s, totals)[~s.mask] == 0) for s in samples)
