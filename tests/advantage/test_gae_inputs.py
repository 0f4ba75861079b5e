"""Tests that arrays without a meaningful estimate are refused."""

from __future__ import annotations

import numpy as np
import pytest

from app.advantage.gae.input_checks import check_inputs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"values": np.zeros((2, 5))},
            r"values: shape \[2, 5\] does not match rewards of shape \[2, 3\], expected \[2, 3\] or \[2, 4\]",
        ),
        ({"rewards": np.zeros(3)}, r"rewards: expected \[B, T\], got the shape \[3\]"),
        (
            {"mask": np.ones((3, 3), bool)},
            r"mask: shape \[3, 3\] does not match rewards of shape \[2, 3\], expected \[2, 3\]",
        ),
        (
            {"rewards": np.array([[0, 0, 0], [0, np.nan, 0]])},
            "rewards: row 1, index 1 is nan; expected a finite float32",
        ),
        ({"rewards": np.full((2, 3), 1e39)}, r"rewards: row 0, index 0 is 1e\+39"),
        ({"values": np.array([[0, 0, 0, 0], [0, 0, 0, np.inf]])}, "values: row 1, index 3 is inf"),
    ],
)
def test_inputs_that_mean_nothing_are_refused(changes, message):
    arguments = {"rewards": np.zeros((2, 3)), "values": np.zeros((2, 4))} | changes
    with pytest.raises(ValueError, match=message):
        check_inputs(arguments.pop("rewards"), arguments.pop("values"), **arguments)


def test_masked_rubbish_is_refused_only_where_it_is_read():
    rewards, mask = np.array([[np.nan, 1.0]]), np.array([[False, True]])
    check_inputs(rewards, np.zeros((1, 2)), mask=mask)
    with pytest.raises(ValueError, match="row 0, index 0 is nan"):
        check_inputs(rewards, np.zeros((1, 2)), mask=mask, mask_mode="through")


def test_large_numbers_whose_sum_is_infinite_are_numbers():
    check_inputs(np.full((2, 3), 3e38, np.float32), np.zeros((2, 3)))
