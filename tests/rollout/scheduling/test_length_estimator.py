import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rollout.scheduling.length_estimator import LengthEstimator, censored_quantile
from app.rollout.scheduling.protocol import NewSample
from app.rollout.scheduling.sample_states import SampleEntry


def entry(uid: str = "a", *, tokens: int = 0, finish: str | None = None, prompt: str = "p") -> SampleEntry:
    return SampleEntry(NewSample(uid, prompt, 0, 10, 1000), 0, num_tokens=tokens, finish=finish)


def test_a_censored_quantile_by_hand() -> None:
    # S after 1: 4/5; after 3, with 3 left (2 was censored): 4/5 * 2/3; after 5, the last: 0.
    assert censored_quantile([1, 3, 5], [2, 4], 0.2) == 1
    assert censored_quantile([1, 3, 5], [2, 4], 0.4) == 3
    assert censored_quantile([1, 3, 5], [2, 4], 0.45) == 3
    assert censored_quantile([1, 3, 5], [2, 4], 0.5) == 5


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 99))
def test_without_running_samples_it_is_the_quantile(lengths: list[int], percent: int) -> None:
    expected = np.percentile(lengths, percent, method="inverted_cdf")
    assert censored_quantile(lengths, [], percent / 100) == expected


def test_running_samples_can_only_raise_it() -> None:
    finished = [10, 20, 30, 40, 50]
    assert censored_quantile(finished, [45], 0.5) > censored_quantile(finished, [], 0.5) - 1
    assert censored_quantile(finished, [60] * 5, 0.5) == 50


def test_nothing_is_learnt_from_a_sample_that_was_dropped() -> None:
    lengths = LengthEstimator(window=4)
    assert not lengths.observe(entry(tokens=5, finish="dropped:non-finite logits"), measure=5)
    assert lengths.num_finished == 0 and not lengths.measures and not lengths.has_estimate("p")


def test_siblings_of_a_first_sample_that_was_dropped_are_as_unknown_as_before() -> None:
    lengths = LengthEstimator(window=4)
    lengths.start_probe("p")
    assert lengths.has_estimate("p")
    lengths.observe(entry(tokens=0, finish="dropped:non-finite logits"), measure=0)
    assert not lengths.has_estimate("p")


def test_a_prompt_whose_samples_were_all_dropped_has_no_history() -> None:
    lengths = LengthEstimator(window=4)
    lengths.observe(entry(tokens=7, finish=None), measure=7)
    lengths.finish_prompt("p", mean=None)
    assert not lengths.has_estimate("p") and not lengths.group_measure


def test_it_is_infinite_while_too_many_run() -> None:
    assert censored_quantile([1], [2, 2, 2, 2], 0.8) == math.inf


def test_there_is_no_threshold_before_enough_have_finished() -> None:
    lengths = LengthEstimator(window=4)
    for i in range(3):
        lengths.observe(entry(f"{i}", tokens=i + 1, finish="stop"), measure=i + 1)
    assert lengths.threshold([], percentile=80, min_finished=4) is None
    assert lengths.threshold([], percentile=80, min_finished=3) == 3


def test_the_window_forgets() -> None:
    lengths = LengthEstimator(window=4)
    for i, length in enumerate([1000, 1000, 1, 1, 1, 1]):
        lengths.observe(entry(f"{i}", tokens=length, finish="stop"), measure=length)
    assert lengths.threshold([], percentile=99, min_finished=1) == 1


@pytest.mark.parametrize(("history", "sibling", "own", "expected"), [(5, 9, 2, 9), (50, 9, 2, 50), (5, 9, 20, 20)])
def test_the_estimate_is_the_largest_of_history_group_and_own(
    history: int, sibling: int, own: int, expected: int
) -> None:
    lengths = LengthEstimator(window=4, history={"p": history})
    lengths.observe(entry("sibling", tokens=sibling), measure=sibling)
    assert lengths.estimate(entry(tokens=own)) == expected
