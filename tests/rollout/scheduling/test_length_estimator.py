import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rollout.scheduling.length_estimator import FinishedLength, LearnedLengths, LengthEstimator, censored_quantile
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
    assert not lengths.observe(entry(tokens=5, finish="dropped:non-finite logits"))
    assert lengths.num_finished == 0 and not lengths.finished and not lengths.has_estimate("p")


def test_siblings_of_a_first_sample_that_was_dropped_are_as_unknown_as_before() -> None:
    lengths = LengthEstimator(window=4)
    lengths.start_probe("p")
    assert lengths.has_estimate("p")
    lengths.observe(entry(tokens=0, finish="dropped:non-finite logits"))
    assert not lengths.has_estimate("p")


def test_a_prompt_whose_samples_were_all_dropped_has_no_history() -> None:
    lengths = LengthEstimator(window=4)
    lengths.observe(entry(tokens=7, finish=None))
    lengths.finish_prompt("p", mean=None)
    assert not lengths.has_estimate("p") and not lengths.group_measure


def test_it_is_infinite_while_too_many_run() -> None:
    assert censored_quantile([1], [2, 2, 2, 2], 0.8) == math.inf


def test_there_is_no_threshold_before_enough_have_finished() -> None:
    lengths = LengthEstimator(window=4)
    for i in range(3):
        lengths.observe(entry(f"{i}", tokens=i + 1, finish="stop"))
    assert lengths.threshold([], percentile=80, min_finished=4) is None
    assert lengths.threshold([], percentile=80, min_finished=3) == 3


def test_a_threshold_in_seconds_ignores_samples_that_were_only_counted_in_tokens() -> None:
    learned = LearnedLengths({}, (FinishedLength(9, None), FinishedLength(5, 2.0), FinishedLength(7, 1.0)))
    lengths = LengthEstimator(window=4, unit="seconds", learned=learned)
    assert lengths.threshold([], percentile=80, min_finished=3) is None
    assert lengths.threshold([], percentile=80, min_finished=2) == 2.0
    assert lengths.mean_length(default=1) == 7
    assert LengthEstimator(window=4, learned=learned).threshold([], percentile=80, min_finished=3) == 9


def test_what_was_learned_survives_json_and_is_joined_in_order() -> None:
    first = LearnedLengths({"p": 3.0, "q": 1.0}, (FinishedLength(1, None), FinishedLength(2, 0.5)))
    second = LearnedLengths({"p": 5.0}, (FinishedLength(3, None),))
    assert LearnedLengths.from_json(json.loads(json.dumps(first.to_json()))) == first
    both = first.updated(second, window=2)
    assert both.prompts == {"p": 5.0, "q": 1.0} and [one.num_tokens for one in both.finished] == [2, 3]
    many = LearnedLengths({}, tuple(FinishedLength(i, None) for i in range(8)))
    assert [one.num_tokens for one in first.updated(many, window=4).finished] == [0, 2, 4, 6], "short ones finish first"
    hosts = LearnedLengths.of_hosts([second, many])
    assert [one.num_tokens for one in hosts.finished] == [3, 0, 1, 2, 3, 4, 5, 6, 7] and hosts.prompts == {"p": 5.0}
    assert both.about(["q", "r"]) == LearnedLengths({"q": 1.0}, both.finished)


def test_the_window_forgets() -> None:
    lengths = LengthEstimator(window=4)
    for i, length in enumerate([1000, 1000, 1, 1, 1, 1]):
        lengths.observe(entry(f"{i}", tokens=length, finish="stop"))
    assert lengths.threshold([], percentile=99, min_finished=1) == 1


@pytest.mark.parametrize(("history", "sibling", "own", "expected"), [(5, 9, 2, 9), (50, 9, 2, 50), (5, 9, 20, 20)])
def test_the_estimate_is_the_largest_of_history_group_and_own(
    history: int, sibling: int, own: int, expected: int
) -> None:
    lengths = LengthEstimator(window=4, learned=LearnedLengths({"p": history}, ()))
    lengths.observe(entry("sibling", tokens=sibling))
    assert lengths.estimate(entry(tokens=own)) == expected
