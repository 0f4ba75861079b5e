"""Tests that saved rewards are counted as when they were computed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from app.plugins.values import Failure
from app.records.sample import Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.reward.aggregate import OnError, RewardedSamples, RewardOutcome, aggregate_rewards, restore_dropped
from app.reward.plugin import StepInfo
from app.reward.reward_functions import has_saved_reward, reuse_saved_rewards
from tests.reward.samples import make_group

BROKEN = RewardOutcome(failure=Failure("raised", "ValueError: no"))
SILENT = RewardOutcome()
OUTCOMES = {
    "a": [RewardOutcome(1.0), BROKEN, SILENT, SILENT, RewardOutcome(0.5)],
    "ab": [RewardOutcome(2.0), RewardOutcome(1.0), BROKEN, SILENT, SILENT],
}


def given(on_error: OnError) -> RewardedSamples:
    """Samples with values, failures and abstentions; the last one was dropped in the rollout."""
    group = make_group(*"vwxyz")
    lost = replace(make_group("l")[0], sample_index=5, finish_reason="dropped:worker")
    return restore_dropped(
        aggregate_rewards(group, OUTCOMES, {"a": 1.0, "ab": 0.5}, on_error), [*group, lost], fate="left out"
    )


def through_a_file(sample: Sample) -> Sample:
    return sample_from_record(json.loads(json.dumps(sample_to_record(sample))), where="here")


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_failures_and_abstentions_are_those_that_were_told(on_error: OnError) -> None:
    scored = given(on_error)
    again = reuse_saved_rewards([through_a_file(s) for s in scored.samples], StepInfo(), names=["a", "ab"])
    for name, counts in scored.function_counts.items():
        found = again.function_counts[name]
        assert (found.num_errors, found.num_abstained) == (counts.num_errors, counts.num_abstained) == (1, 2), name
    assert (again.num_without_reward, again.num_errors) == (scored.num_without_reward, scored.num_errors) == (1, 3)
    assert [s.reward for s in again.samples] == [s.reward for s in scored.samples]
    assert (again.notices, again.fatal_error) == ((), None)


def test_a_sample_is_judged_that_has_a_reward_or_was_left_out_for_want_of_one() -> None:
    assert all(has_saved_reward(through_a_file(s)) for s in given("drop").samples)
    assert sum(s.reward is None for s in given("drop").samples) == 4
    assert not has_saved_reward(make_group("x")[0])


def test_lines_of_others_under_the_field_of_failures_are_no_failures() -> None:
    (sample,) = make_group("x")
    for odd in ("a: raised", [1, None], {"a": 1}):
        foreign = replace(sample, reward=1.0, rewards={"a": 1.0}, extra={"reward_errors": odd})
        assert reuse_saved_rewards([foreign], StepInfo(), names=["a"]).num_errors == 0
