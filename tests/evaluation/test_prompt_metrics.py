"""Tests of pass@k and majority votes against hand-computed values and all subsets."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from app.evaluation.prompt_metrics import majority_vote_accuracy, pass_at_k


@pytest.mark.parametrize("num_samples", [1, 2, 5, 8])
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_samples: int) -> None:
    for num_right in range(num_samples + 1):
        right = [i < num_right for i in range(num_samples)]
        for k in range(1, num_samples + 1):
            expected = np.mean([any(chosen) for chosen in combinations(right, k)])
            assert pass_at_k(num_right, num_samples, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_one_is_the_share_of_right_samples() -> None:
    assert pass_at_k(3, 8, 1) == 3 / 8


def test_pass_at_more_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@5 needs at least 5 samples, got 4"):
        pass_at_k(4, 4, 5)


@pytest.mark.parametrize(
    ("votes", "share"),
    [
        ([7, 7, 3], 1.0),
        ([3, 3, 7], 0.0),
        ([7, 3], 0.5),
        ([7, 3, 5], 1 / 3),
        ([3, 5], 0.0),
        ([7, None, None, None], 1.0),
        ([None, None], 0.0),
    ],
)
def test_the_majority_is_right_as_often_as_chance_breaks_ties(votes: list[int | None], share: float) -> None:
    assert majority_vote_accuracy(votes, 7) == pytest.approx(share)
