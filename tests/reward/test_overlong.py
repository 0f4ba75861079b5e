from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from app.reward.plugin import StepInfo
from app.reward.reward_functions import OverlongPenalty, RewardFunctions
from settings.schema.reward import PluginSettings, RewardSettings
from tests.reward.samples import columns_of, make_prompt, make_sample

PENALTY = OverlongPenalty(max_length=10, buffer=4, max_penalty=2.0)


@pytest.mark.parametrize(
    ("num_tokens", "penalty"), [(0, 0.0), (6, 0.0), (7, -0.5), (8, -1.0), (9, -1.5), (10, -2.0), (12, -2.0)]
)
def test_the_penalty_falls_over_the_buffer_and_no_further(num_tokens: int, penalty: float) -> None:
    assert PENALTY.penalty_for(num_tokens) == penalty
    assert str(PENALTY.penalty_for(0)) == "0.0"


def of_length(num_tokens: int):
    ids = np.zeros(num_tokens, np.int32)
    return replace(make_sample("#### 18", make_prompt()), completion_ids=ids)


def test_it_is_a_reward_of_its_own_name_and_part_of_their_sum() -> None:
    samples = [of_length(6), of_length(9)]
    settings = RewardSettings.model_validate({"functions": [{"name": "gsm8k", "weight": 3.0}]})
    with RewardFunctions(settings, PluginSettings(), columns_of(samples), overlong=PENALTY) as rewards:
        assert rewards.reward_names == ("gsm8k", "overlong")
        short, long = rewards.compute_rewards(samples, StepInfo(step=1, num_steps=2)).samples
    assert (short.rewards, short.reward) == ({"gsm8k": 1.0, "overlong": 0.0}, 3.0)
    assert (long.rewards, long.reward) == ({"gsm8k": 1.0, "overlong": -1.5}, 1.5)


def test_a_sample_without_reward_gets_no_penalty_either() -> None:
    sample = of_length(10)
    assert PENALTY.apply(sample) is sample
