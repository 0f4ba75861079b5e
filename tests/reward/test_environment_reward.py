"""Tests of rewards of environments and of the length penalty."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.evaluation.prompt_metrics import estimate_metrics, prompt_columns
from app.reward.aggregate import NO_REWARD_FINISH_REASON
from app.reward.plugin import StepInfo
from app.reward.reward_functions import EnvironmentReward, OverlongPenalty, RewardFunctions, accuracy_function_name
from settings.schema.reward import PluginSettings, RewardSettings
from tests.episodes import with_turns
from tests.reward.samples import columns_of, write_plug_in

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
    # All nine tokens behind the prompt count for the length, observations included.
    assert one.rewards == {"last": 1.0, "env": 3.5, "overlong": -1.0}
    assert one.reward == 1.0 + 2.0 * 3.5 - 1.0
    assert one.token_rewards is None


def test_a_sample_whose_environment_failed_has_no_reward() -> None:
    failed = replace(GAME, episode=None, finish_reason="dropped:environment timeout", sample_index=1)
    scored = rewarded([GAME, failed])
    assert [(s.rewards, s.reward) for s in scored.samples] == [({"env": 3.5}, 3.5), ({}, None)]
    assert scored.num_errors == scored.num_without_reward == 0
    assert scored.notices == ("1 of 2 samples have environment timeout, left out; first row-0/s1",)


def test_a_restored_sample_learns_from_its_turns_only() -> None:
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
    # Weighted: 1.0 for the first turn; 2.0 for the last, then 4.0 of the score, 0.25 of the function, -1.0 of length.
    np.testing.assert_array_equal(one.token_rewards, [0, 1.0, 0, 0, 0.0, 0, 0, 0, 5.25])
    assert one.token_rewards.dtype == np.float32 and one.token_rewards.sum() == one.reward


def test_the_reward_of_a_masked_turn_is_not_lost() -> None:
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
    # A game that is won by half has no pass@k.
    assert metrics["eval/pass@2"].value == (None if pass_at_2 is None else np.mean(pass_at_2))
    assert metrics["eval/format_rate"].value is None


def test_length_penalty_falls_linearly_over_the_buffer(tmp_path: Path) -> None:
    penalty = OverlongPenalty(max_length=10, buffer=4, max_penalty=2.0)
    penalties = {0: 0.0, 6: 0.0, 7: -0.5, 8: -1.0, 9: -1.5, 10: -2.0, 12: -2.0}
    assert {num_tokens: penalty.penalty_for(num_tokens) for num_tokens in penalties} == penalties
    assert str(penalty.penalty_for(0)) == "0.0"
    assert penalty.apply(GAME) is GAME  # It has no reward.
