"""Tests of the aggregation of values, abstentions and failures, with hand-computed rewards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.plugins.values import MAX_TEXT_CHARACTERS, Failure, one_line
from app.reward.aggregate import OnError, RewardedSamples, RewardOutcome, aggregate_rewards
from tests.reward.samples import make_group

BROKEN = RewardOutcome(failure=Failure("raised", "ValueError: no"))
SILENT = RewardOutcome()
WEIGHTS = {"a": 1.0, "b": -0.5, "c": 0.0}


def weighed(on_error: OnError, **outcomes: list[RewardOutcome]) -> RewardedSamples:
    samples = make_group(*"xyz"[: len(outcomes["a"])])
    return aggregate_rewards(samples, outcomes, WEIGHTS, on_error)


def test_weight_zero_is_shown_but_not_counted_and_negative_weights_punish() -> None:
    (sample,) = weighed("raise", a=[RewardOutcome(2.0)], b=[RewardOutcome(1.0)], c=[RewardOutcome(7.0)]).samples
    assert (sample.reward, sample.rewards) == (1.5, {"a": 2.0, "b": 1.0, "c": 7.0})


def test_who_abstains_has_no_part_in_the_sum() -> None:
    scored = weighed("raise", a=[SILENT, RewardOutcome(1.0)], b=[RewardOutcome(1.0), SILENT])
    assert [(s.reward, s.rewards) for s in scored.samples] == [(-0.5, {"b": 1.0}), (1.0, {"a": 1.0})]
    assert (scored.num_abstained, scored.num_errors, scored.fatal_error) == (2, 0, None)


def test_a_failure_counts_zero_and_is_kept_in_the_record() -> None:
    scored = weighed("zero", a=[BROKEN, RewardOutcome(1.0)], b=[RewardOutcome(1.0), RewardOutcome(1.0)])
    assert [s.rewards for s in scored.samples] == [{"a": 0.0, "b": 1.0}, {"a": 1.0, "b": 1.0}]
    assert [s.reward for s in scored.samples] == [-0.5, 0.5]
    assert scored.samples[0].extra == {"reward_errors": ["a: raised: ValueError: no"]}
    assert scored.samples[1].extra == {}
    assert {name: t.num_errors for name, t in scored.function_counts.items()} == {"a": 1, "b": 0}
    assert scored.notices == (
        "reward a failed on 1 of 2 samples (1 raised), counted as 0; first q/0/s0: ValueError: no",
    )


def test_a_dropped_sample_keeps_what_is_known_and_has_no_reward() -> None:
    scored = weighed("drop", a=[BROKEN, RewardOutcome(1.0)], b=[RewardOutcome(1.0), SILENT])
    dropped, kept = scored.samples
    assert (dropped.reward, dropped.rewards, dropped.finish_reason) == (None, {"b": 1.0}, "dropped:reward")
    assert (kept.reward, kept.finish_reason) == (1.0, "stop")
    assert dropped.extra["finish_reason_before_drop"] == "stop" and kept.extra == {}
    assert scored.notices[0].startswith("reward a failed on 1 of 2 samples (1 raised), left out;")


def test_to_raise_names_function_sample_reason_and_the_way_out() -> None:
    scored = weighed("raise", a=[RewardOutcome(1.0), RewardOutcome(1.0)], b=[RewardOutcome(1.0), BROKEN])
    assert scored.fatal_error == (
        "reward.functions: b: raised: ValueError: no (sample q/0/s1). Fix the function, or set reward.on_error to "
        "zero (the value counts as 0) or drop (the sample is left out)"
    )


@pytest.mark.parametrize(("on_error", "reward"), [("zero", 0.0), ("drop", None), ("raise", 0.0)])
def test_a_sample_that_all_abstain_from_is_an_error_of_its_own(on_error: OnError, reward: float | None) -> None:
    scored = weighed(on_error, a=[SILENT, RewardOutcome(1.0)], b=[SILENT, SILENT])
    assert scored.samples[0].reward == reward
    assert scored.samples[0].rewards == {}
    assert (scored.num_errors, scored.num_without_reward, scored.num_abstained) == (1, 1, 3)
    assert scored.samples[0].extra["reward_errors"] == ["no reward: every reward function abstained"]
    assert scored.notices[0].startswith("no reward for 1 of 2 samples (1 no reward)")
    assert (scored.fatal_error is not None) == (on_error == "raise")


def test_a_judge_that_abstains_has_not_failed_but_one_that_fails_has() -> None:
    samples = make_group(*"xyz")
    scored = aggregate_rewards(
        samples, {"a": [SILENT, RewardOutcome(2.0), BROKEN]}, WEIGHTS, "raise", when_all_abstain=None
    )
    assert [s.rewards for s in scored.samples] == [{}, {"a": 2.0}, {"a": 0.0}]
    assert [s.extra.keys() for s in scored.samples] == [set(), set(), {"reward_errors"}]
    assert (scored.num_errors, scored.num_without_reward, scored.num_abstained) == (1, 0, 1)
    assert "sample q/0/s2" in (scored.fatal_error or "")


def test_failing_where_others_abstain_is_not_abstaining() -> None:
    scored = weighed("zero", a=[BROKEN], b=[SILENT])
    assert scored.num_without_reward == 0 and scored.samples[0].reward == 0.0


def test_failures_of_one_function_are_told_in_one_line_by_kind() -> None:
    late = RewardOutcome(failure=Failure("timeout", "took more than 1 s"))
    (notice,) = weighed("zero", a=[late, BROKEN, late]).notices
    assert notice.startswith(
        "reward a failed on 3 of 3 samples (2 timeout, 1 raised), counted as 0; first q/0/s0: took"
    )


def test_further_numbers_are_summed_with_their_counts() -> None:
    outcomes = [RewardOutcome(1.0, extras={"acc": 1.0}), RewardOutcome(1.0, extras={"acc": 0.0, "len": 4.0}), SILENT]
    assert weighed("zero", a=outcomes).function_counts["a"].extras == {"acc": (1.0, 2), "len": (4.0, 1)}


def test_errors_of_an_earlier_scoring_do_not_stay() -> None:
    failed = weighed("zero", a=[BROKEN]).samples
    again = aggregate_rewards(failed, {"a": [RewardOutcome(1.0)]}, WEIGHTS, "zero")
    assert again.samples[0].extra == {}


def test_a_dropped_sample_that_gets_a_reward_after_all_is_as_it_was_sampled() -> None:
    (sample,) = make_group("x")
    dropped = aggregate_rewards([replace(sample, finish_reason="length")], {"a": [BROKEN]}, WEIGHTS, "drop").samples
    masked = [replace(s, loss_mask=np.zeros(1, bool), advantages=np.zeros(1, np.float32)) for s in dropped]
    (again,) = aggregate_rewards(masked, {"a": [BROKEN]}, WEIGHTS, "drop").samples
    assert (again.finish_reason, again.extra["finish_reason_before_drop"]) == ("dropped:reward", "length")
    (mended,) = aggregate_rewards([again], {"a": [RewardOutcome(1.0)]}, WEIGHTS, "drop").samples
    assert (mended.reward, mended.finish_reason, mended.extra) == (1.0, "length", {})
    assert mended.mask.all() and mended.advantages is None


def test_what_goes_to_a_terminal_is_one_short_line_without_control_characters() -> None:
    assert one_line("a\x1b[2J\n\tb \udc80") == "a\ufffd[2J b \ufffd"
    assert len(one_line("x" * 10_000)) == MAX_TEXT_CHARACTERS
