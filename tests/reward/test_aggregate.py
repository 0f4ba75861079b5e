"""Tests how rewards combine values, abstentions, failures, environments and the length penalty."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.evaluation.prompt_metrics import estimate_metrics, prompt_columns
from app.plugins.values import Failure
from app.records.sample import Sample
from app.records.sample_json import sample_from_record, sample_to_record
from app.reward.aggregate import (
    NO_REWARD_FINISH_REASON,
    OnError,
    RewardedSamples,
    RewardOutcome,
    aggregate_rewards,
    restore_dropped,
)
from app.reward.plugin import StepInfo
from app.reward.reward_functions import (
    EnvironmentReward,
    OverlongPenalty,
    RewardFunctions,
    accuracy_function_name,
    has_saved_reward,
    reuse_saved_rewards,
)
from settings.schema.reward import PluginSettings, RewardSettings
from tests.episodes import with_turns
from tests.reward.samples import columns_of, make_group, write_plug_in

BROKEN = RewardOutcome(failure=Failure("raised", "ValueError: no"))
LATE = RewardOutcome(failure=Failure("timeout", "took more than 1 s"))
SILENT = RewardOutcome()
WEIGHTS = {"a": 1.0, "b": -0.5, "c": 0.0}


def weighed(on_error: OnError, **outcomes: list[RewardOutcome]) -> RewardedSamples:
    samples = make_group(*"xyz"[: len(outcomes["a"])])
    return aggregate_rewards(samples, outcomes, WEIGHTS, on_error)


def test_reward_is_the_weighted_sum_without_abstentions() -> None:
    two, one, seven = (RewardOutcome(value) for value in (2.0, 1.0, 7.0))
    scored = weighed("raise", a=[two, SILENT, one], b=[one, one, SILENT], c=[seven, SILENT, SILENT])
    assert [s.rewards for s in scored.samples] == [{"a": 2.0, "b": 1.0, "c": 7.0}, {"b": 1.0}, {"a": 1.0}]
    assert [s.reward for s in scored.samples] == [1.5, -0.5, 1.0]
    assert (scored.num_abstained, scored.num_errors, scored.fatal_error) == (4, 0, None)


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
def test_a_sample_on_which_every_function_abstains_is_a_separate_error(on_error: OnError, reward: float | None) -> None:
    scored = weighed(on_error, a=[SILENT, RewardOutcome(1.0)], b=[SILENT, SILENT])
    assert scored.samples[0].reward == reward
    assert scored.samples[0].rewards == {}
    assert (scored.num_errors, scored.num_without_reward, scored.num_abstained) == (1, 1, 3)
    assert scored.samples[0].extra["reward_errors"] == ["no reward: every reward function abstained"]
    assert scored.notices[0].startswith("no reward for 1 of 2 samples (1 no reward)")
    assert (scored.fatal_error is not None) == (on_error == "raise")


def test_an_abstention_of_the_judge_is_not_a_failure() -> None:
    samples = make_group(*"xyz")
    scored = aggregate_rewards(
        samples, {"a": [SILENT, RewardOutcome(2.0), BROKEN]}, WEIGHTS, "raise", when_all_abstain=None
    )
    assert [s.rewards for s in scored.samples] == [{}, {"a": 2.0}, {"a": 0.0}]
    assert [s.extra.keys() for s in scored.samples] == [set(), set(), {"reward_errors"}]
    assert (scored.num_errors, scored.num_without_reward, scored.num_abstained) == (1, 0, 1)
    assert "sample q/0/s2" in (scored.fatal_error or "")


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
    """Returns samples with values, failures and abstentions, the last of which was dropped in the rollout."""
    group = make_group(*"vwxyz")
    lost = replace(make_group("l")[0], sample_index=5, finish_reason="dropped:worker")
    return restore_dropped(
        aggregate_rewards(group, OUTCOMES, {"a": 1.0, "ab": 0.5}, on_error), [*group, lost], fate="left out"
    )


def through_a_file(sample: Sample) -> Sample:
    return sample_from_record(json.loads(json.dumps(sample_to_record(sample))), where="here")


@pytest.mark.parametrize("on_error", ["zero", "drop"])
def test_failures_and_abstentions_in_saved_rewards_are_counted_again(on_error: OnError) -> None:
    scored = given(on_error)
    again = reuse_saved_rewards([through_a_file(s) for s in scored.samples], StepInfo(), names=["a", "ab"])
    for name, counts in scored.function_counts.items():
        found = again.function_counts[name]
        assert (found.num_errors, found.num_abstained) == (counts.num_errors, counts.num_abstained) == (1, 2), name
    assert (again.num_without_reward, again.num_errors) == (scored.num_without_reward, scored.num_errors) == (1, 3)
    assert [s.reward for s in again.samples] == [s.reward for s in scored.samples]
    assert (again.notices, again.fatal_error) == ((), None)
    assert on_error == "zero" or all(has_saved_reward(through_a_file(s)) for s in scored.samples)
    assert not has_saved_reward(make_group("x")[0])


PENALTY = OverlongPenalty(max_length=9, buffer=4, max_penalty=1.0)
GAME = with_turns([(2, 2), (1, 1), (3, 0)], [0.5, 0.0, 1.0], scores={"win": 2.0})


def rewarded(
    samples: list[Any],
    functions: list[Any] = [],  # noqa: B006
    *,
    weight: float = 1.0,
    rewards_turns: bool = False,
    **others: Any,
) -> Any:
    settings = RewardSettings.model_validate({"functions": functions})
    environment = EnvironmentReward(weight=weight, rewards_turns=rewards_turns)
    with RewardFunctions(settings, PluginSettings(), columns_of(samples), environment=environment, **others) as rewards:
        return rewards.compute_rewards(samples, StepInfo())


def test_reward_is_the_sum_of_functions_environment_and_penalty(tmp_path: Path) -> None:
    path = write_plug_in(
        tmp_path,
        "def last(completion, completion_ids): return float(completion == 'turn 2' and len(completion_ids) == 3)",
    )
    # Functions get the last turn.
    (one,) = rewarded([GAME], [f"{path}:last"], weight=2.0, overlong=PENALTY).samples
    # All nine tokens after the prompt count for the length, including observations.
    assert one.rewards == {"last": 1.0, "env": 3.5, "overlong": -1.0}
    assert one.reward == 1.0 + 2.0 * 3.5 - 1.0
    assert one.token_rewards is None


def test_a_sample_whose_environment_failed_has_no_reward() -> None:
    failed = replace(GAME, episode=None, finish_reason="dropped:environment timeout", sample_index=1)
    scored = rewarded([GAME, failed])
    assert [(s.rewards, s.reward) for s in scored.samples] == [({"env": 3.5}, 3.5), ({}, None)]
    assert scored.num_errors == scored.num_without_reward == 0
    assert scored.notices == ("the rollout dropped 1 of 2 samples (1 environment timeout), left out; first row-0/s1",)


def test_a_restored_sample_has_only_its_turns_in_the_loss() -> None:
    extra = {"reward_errors": ["f: raised: x"], "finish_reason_before_drop": "length"}
    mask = np.zeros(9, bool)
    dropped = replace(GAME, finish_reason=NO_REWARD_FINISH_REASON, loss_mask=mask, extra=extra)
    (one,) = rewarded([dropped], rewards_turns=True).samples
    assert (one.finish_reason, one.mask.tolist()) == ("length", GAME.mask.tolist())
    assert one.token_rewards is not None and one.token_rewards[1] == 0.5


def test_turn_rewards_are_on_the_last_token_of_each_turn(tmp_path: Path) -> None:
    path = write_plug_in(tmp_path, "def last(completion): return 0.25")
    options: Any = {"weight": 2.0, "rewards_turns": True, "overlong": PENALTY}
    (one,) = rewarded([GAME], [f"{path}:last"], **options).samples
    # With weights, the first turn gets 1.0, and the last 2.0 + 4.0 (score) + 0.25 (function) - 1.0 (length).
    np.testing.assert_array_equal(one.token_rewards, [0, 1.0, 0, 0, 0.0, 0, 0, 0, 5.25])
    assert one.token_rewards.dtype == np.float32 and one.token_rewards.sum() == one.reward


def test_the_reward_of_a_masked_turn_moves_to_an_unmasked_token() -> None:
    masks = ([0, 0, 0, 0, 1, 0, 1, 1, 0], [1, 1, 0, 0, 0, 0, 0, 0, 0])
    samples = [replace(GAME, loss_mask=np.array(mask, bool)) for mask in masks]
    first, second = rewarded(samples, rewards_turns=True).samples
    np.testing.assert_array_equal(first.token_rewards, [0, 0, 0, 0, 0.5, 0, 0, 3.0, 0])
    np.testing.assert_array_equal(second.token_rewards, [0, 3.5, 0, 0, 0, 0, 0, 0, 0])
    (masked,) = rewarded([replace(GAME, loss_mask=np.zeros(9, bool))], rewards_turns=True).samples
    assert masked.token_rewards is None and masked.reward == 3.5


@pytest.mark.parametrize(("win", "pass_at_2"), [(1.0, [1.0, 0.0]), (0.5, None)])
def test_accuracy_without_functions_is_the_environment_reward(win: float, pass_at_2: Any) -> None:
    ends = [[win, 0.0], [0.0, 0.0]]
    samples = [
        with_turns([(1, 1), (1, 0)], scores={"win": score}, group_id=group, sample_index=i)
        for group, scores in enumerate(ends)
        for i, score in enumerate(scores)
    ]
    settings, columns = RewardSettings.model_validate({"functions": []}), columns_of(samples)
    judge = accuracy_function_name(settings)
    environment = EnvironmentReward(weight=0.0, rewards_turns=True)
    with RewardFunctions(settings, PluginSettings(), columns, columns, environment=environment) as rewards:
        judged = rewards.grade_held_out(samples, StepInfo()).samples
    table = {name: np.array(column) for name, column in prompt_columns(judged, judge=judge, num_samples=2).items()}
    metrics = estimate_metrics(table, num_samples=2)
    assert judge == "env" and not any(name.startswith("eval/maj@") for name in metrics)
    assert metrics["eval/accuracy"].value == win / 4
    # Fractional scores have no pass@k.
    assert metrics["eval/pass@2"].value == (None if pass_at_2 is None else np.mean(pass_at_2))
    assert metrics["eval/format_rate"].value is None


def test_length_penalty_grows_linearly_over_the_buffer() -> None:
    penalty = OverlongPenalty(max_length=10, buffer=4, max_penalty=2.0)
    penalties = {0: 0.0, 6: 0.0, 7: -0.5, 8: -1.0, 9: -1.5, 10: -2.0, 12: -2.0}
    assert {num_tokens: penalty.penalty_for(num_tokens) for num_tokens in penalties} == penalties
    assert str(penalty.penalty_for(0)) == "0.0"
    assert penalty.apply(GAME) is GAME  # It has no reward.
