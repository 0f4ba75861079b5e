"""Tests expected lengths of samples, and the lengths of segments that follow from them."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.rollout.scheduling.length_estimator import FinishedLength, LearnedLengths, LengthEstimator, censored_quantile
from app.rollout.scheduling.protocol import NewSample
from app.rollout.scheduling.sample_states import SampleEntry
from app.rollout.scheduling.segment_limits import OVERHEAD_STEPS, SegmentLimits, segment_limits
from settings.schema.rollout import SegmentSettings

DROPPED = "dropped:non-finite logits"


def entry(uid: str = "a", *, tokens: int = 0, finish: str | None = None) -> SampleEntry:
    return SampleEntry(NewSample(uid, "p", 0, 10, 1000), 0, num_tokens=tokens, finish=finish)


def test_censored_quantile_equals_hand_computed_values() -> None:
    # Survival is 4/5 after 1; 4/5 * 2/3 after 3, with 3 left (2 was censored); and 0 after 5, the last.
    assert [censored_quantile([1, 3, 5], [2, 4], q) for q in (0.2, 0.4, 0.45, 0.5)] == [1, 3, 3, 5]
    assert censored_quantile([10, 20, 30, 40, 50], [60] * 5, 0.5) == 50
    assert censored_quantile([1], [2, 2, 2, 2], 0.8) == math.inf, "too many are still running"


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 99))
def test_censored_quantile_without_running_samples_is_the_quantile(lengths: list[int], percent: int) -> None:
    expected = np.percentile(lengths, percent, method="inverted_cdf")
    assert censored_quantile(lengths, [], percent / 100) == expected


def test_dropped_samples_do_not_enter_the_length_statistics() -> None:
    lengths = LengthEstimator(window=4)
    assert not lengths.observe(entry(tokens=5, finish=DROPPED))
    assert lengths.num_finished == 0 and not lengths.finished and not lengths.has_estimate("p")
    lengths.start_probe("p")
    assert lengths.has_estimate("p")
    lengths.observe(entry(finish=DROPPED))
    assert not lengths.has_estimate("p"), "siblings of a dropped probe are as unknown as before"
    lengths.observe(entry(tokens=7))
    lengths.finish_prompt("p", mean=None)
    assert not lengths.has_estimate("p") and not lengths.group_measure, "all its samples were dropped"


def test_the_length_threshold_needs_enough_finished_samples_and_forgets_old_ones() -> None:
    lengths = LengthEstimator(window=4)
    for i, length in enumerate([1000, 1000, 2, 3]):
        assert lengths.threshold([], percentile=80, min_finished=i + 1) is None
        lengths.observe(entry(f"{i}", tokens=length, finish="stop"))
    assert lengths.threshold([], percentile=80, min_finished=4) == 1000
    for i, length in enumerate([1, 1]):
        lengths.observe(entry(f"later {i}", tokens=length, finish="stop"))
    assert lengths.threshold([], percentile=80, min_finished=4) == 3


def test_threshold_in_seconds_ignores_samples_counted_in_tokens_only() -> None:
    learned = LearnedLengths({}, (FinishedLength(9, None), FinishedLength(5, 2.0), FinishedLength(7, 1.0)))
    lengths = LengthEstimator(window=4, unit="seconds", learned=learned)
    assert lengths.threshold([], percentile=80, min_finished=3) is None
    assert lengths.threshold([], percentile=80, min_finished=2) == 2.0
    assert lengths.mean_length(default=1) == 7
    assert LengthEstimator(window=4, learned=learned).threshold([], percentile=80, min_finished=3) == 9


def test_learned_lengths_survive_json_and_are_merged_in_order() -> None:
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


def limits(num_active: int, *, has_waiting: bool = False, mean: float = 512.0, least: int = 64) -> SegmentLimits:
    state = {"mean_length": mean, "batch_sizes": (2, 4), "capacity": 8192}
    return segment_limits(SegmentSettings(min=least, max=4096), num_active=num_active, has_waiting=has_waiting, **state)


def test_segment_length_without_waiting_samples_shares_the_capacity_within_bounds() -> None:
    assert [limits(active).length for active in (1, 4, 16, 1000)] == [4096, 2048, 512, 64]
    assert [limits(active).leave_when_active for active in (1, 2, 3, 4, 5, 8)] == [0, 0, 2, 2, 4, 4]


@pytest.mark.parametrize("mean", [50.0, 512.0, 100_000.0])
def test_segment_length_with_waiting_samples_minimizes_idle_time_and_overhead(mean: float) -> None:
    lengths = np.arange(1, 2000)
    loss = OVERHEAD_STEPS / lengths + lengths / mean / 2
    assert abs(limits(64, has_waiting=True, mean=mean, least=1).length - lengths[loss.argmin()]) <= 1


def test_segment_length_with_waiting_samples_is_bounded_and_short_rows_leave_together() -> None:
    assert [limits(8, has_waiting=True, mean=mean).length for mean in (512.0, 1e9)] == [64, 4096]
    assert [limits(64, has_waiting=True, mean=mean).leave_when_finished for mean in (1e6, 25.0)] == [1, 13]
