"""Tests of the aggregation of values, abstentions and failures, new and saved, with hand-computed rewards."""

import json
from dataclasses import replace

import numpy as np
import pytest

from app.plugins.values import Failure
from app.records.sample import Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.reward.aggregate import OnError, RewardedSamples, RewardOutcome, aggregate_rewards, restore_dropped
from app.reward.plugin import StepInfo
from app.reward.reward_functions import has_saved_reward, reuse_saved_rewards
from tests.reward.samples import make_group

BROKEN = RewardOutcome(failure=Failure("raised", "ValueError: no"))
LATE = RewardOutcome(failure=Failure("timeout", "took more than 1 s"))
SILENT = RewardOutcome()
WEIGHTS = {"a": 1.0, "b": -0.5, "c": 0.0}


def weighed(on_error: OnError, **outcomes: list[RewardOutcome]) -> RewardedSamples:
    samples = make_group(*"xyz"[: len(outcomes["a"])])
    return aggregate_rewards(samples, outcomes, WEIGHTS, on_error)


def test_reward_is_the_weighted_sum_for_zero_and_negative_weights() -> None:
    (sample,) = weighed("raise", a=[RewardOutcome(2.0)], b=[RewardOutcome(1.0)], c=[RewardOutcome(7.0)]).samples
    assert (sample.reward, sample.rewards) == (1.5, {"a": 2.0, "b": 1.0, "c": 7.0})


def test_abstentions_have_no_part_in_the_sum() -> None:
    scored = weighed("raise", a=[SILENT, RewardOutcome(1.0)], b=[RewardOutcome(1.0), SILENT])
    assert [(s.reward, s.rewards) for s in scored.samples] == [(-0.5, {"b": 1.0}), (1.0, {"a": 1.0})]
    assert (scored.num_abstained, scored.num_errors, scored.fatal_error) == (2, 0, None)


def test_on_error_zero_counts_failures_as_zero_and_records_them() -> None:
    scored = weighed("zero", a=[BROKEN, RewardOutcome(1.0), LATE], b=[RewardOutcome(1.0), RewardOutcome(1.0), SILENT])
    assert [s.rewards for s in scored.samples] == [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}, {"a": 0.0}]
    assert [s.reward for s in scored.samples] == [-0.5, 0.5, 0.0]
    assert scored.samples[0].extra == {"reward_errors": ["a: raised: ValueError: no"]}
    assert scored.samples[1].extra == {}
    assert {name: t.num_errors for name, t in scored.function_counts.items()} == {"a": 2, "b": 0}
    assert scored.notices == (
        "reward a failed on 2 of 3 samples (1 raised, 1 timeout), counted as 0; first q/0/s0: ValueError: no",
    )
    assert scored.num_without_reward == 0


def test_on_error_drop_leaves_the_sample_without_reward() -> None:
    scored = weighed("drop", a=[BROKEN, RewardOutcome(1.0)], b=[RewardOutcome(1.0), SILENT])
    dropped, kept = scored.samples
    assert (dropped.reward, dropped.rewards, dropped.finish_reason) == (None, {"b": 1.0}, "dropped:reward")
    assert (kept.reward, kept.finish_reason) == (1.0, "stop")
    assert dropped.extra["finish_reason_before_drop"] == "stop" and kept.extra == {}
    assert scored.notices[0].startswith("reward a failed on 1 of 2 samples (1 raised), left out;")


def test_on_error_raise_names_function_sample_reason_and_remedy() -> None:
    scored = weighed("raise", a=[RewardOutcome(1.0), RewardOutcome(1.0)], b=[RewardOutcome(1.0), BROKEN])
    assert scored.fatal_error == (
        "reward.functions: b: raised: ValueError: no (sample q/0/s1). Fix the function, or set reward.on_error to "
        "zero (the value counts as 0) or drop (the sample is left out)"
    )


@pytest.mark.parametrize(("on_error", "reward"), [("zero", 0.0), ("drop", None), ("raise", 0.0)])
def test_a_sample_without_any_value_is_an_error_of_its_own(on_error: OnError, reward: float | None) -> None:
    scored = weighed(on_error, a=[SILENT, RewardOutcome(1.0)], b=[SILENT, SILENT])
    assert scored.samples[0].reward == reward
    assert scored.samples[0].rewards == {}
    assert (scored.num_errors, scored.num_without_reward, scored.num_abstained) == (1, 1, 3)
    assert scored.samples[0].extra["reward_errors"] == ["no reward: every reward function abstained"]
    assert scored.notices[0].startswith("no reward for 1 of 2 samples (1 no reward)")
    assert (scored.fatal_error is not None) == (on_error == "raise")


def test_an_abstention_of_the_judge_is_no_failure() -> None:
    samples = make_group(*"xyz")
    scored = aggregate_rewards(
        samples, {"a": [SILENT, RewardOutcome(2.0), BROKEN]}, WEIGHTS, "raise", when_all_abstain=None
    )
    assert [s.rewards for s in scored.samples] == [{}, {"a": 2.0}, {"a": 0.0}]
    assert [s.extra.keys() for s in scored.samples] == [set(), set(), {"reward_errors"}]
    assert (scored.num_errors, scored.num_without_reward, scored.num_abstained) == (1, 0, 1)
    assert "sample q/0/s2" in (scored.fatal_error or "")


def test_scoring_again_removes_earlier_errors() -> None:
    failed = weighed("zero", a=[BROKEN]).samples
    again = aggregate_rewards(failed, {"a": [RewardOutcome(1.0)]}, WEIGHTS, "zero")
    assert again.samples[0].extra == {}


def test_scoring_again_restores_a_dropped_sample() -> None:
    (sample,) = make_group("x")
    dropped = aggregate_rewards([replace(sample, finish_reason="length")], {"a": [BROKEN]}, WEIGHTS, "drop").samples
    masked = [replace(s, loss_mask=np.zeros(1, bool), advantages=np.zeros(1, np.float32)) for s in dropped]
    (again,) = aggregate_rewards(masked, {"a": [BROKEN]}, WEIGHTS, "drop").samples
    assert (again.finish_reason, again.extra["finish_reason_before_drop"]) == ("dropped:reward", "length")
    (mended,) = aggregate_rewards([again], {"a": [RewardOutcome(1.0)]}, WEIGHTS, "drop").samples
    assert (mended.reward, mended.finish_reason, mended.extra) == (1.0, "length", {})
    assert mended.mask.all() and mended.advantages is None


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
def test_saved_failures_and_abstentions_are_counted_again(on_error: OnError) -> None:
    scored = given(on_error)
    again = reuse_saved_rewards([through_a_file(s) for s in scored.samples], StepInfo(), names=["a", "ab"])
    for name, counts in scored.function_counts.items():
        found = again.function_counts[name]
        assert (found.num_errors, found.num_abstained) == (counts.num_errors, counts.num_abstained) == (1, 2), name
    assert (again.num_without_reward, again.num_errors) == (scored.num_without_reward, scored.num_errors) == (1, 3)
    assert [s.reward for s in again.samples] == [s.reward for s in scored.samples]
    assert (again.notices, again.fatal_error) == ((), None)


def test_rewarded_and_dropped_samples_have_a_saved_reward() -> None:
    assert all(has_saved_reward(through_a_file(s)) for s in given("drop").samples)
    assert sum(s.reward is None for s in given("drop").samples) == 4
    assert not has_saved_reward(make_group("x")[0])
