"""Tests of stages over saved samples of several turns, which need no environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.prompts.tokenizer import Tokenizer
from app.runtime.inputs import read_policy
from settings import load
from settings.errors import InputError
from tests.program import here, metrics_of, records_of, settings
from tests.replays import looked, rewrite, step_file, train_on

ENVIRONMENT = (
    *("env.source=guess_number", "env.credit=turn", "env.weight=2.0", "env.turn_discount=0.5"),
    *("reward.functions=[]", "algorithm.name=reinforce_plus_plus", "rollout.max_new_tokens=8", "run.steps=1"),
)
OBSERVED = 5


def add_turns(path: Path, tokenizer: Tokenizer) -> Path:
    """Makes the first token of every sample a turn of its own, answered by a token, and removes all rewards."""

    def add_turn(record: dict[str, Any]) -> None:
        ids, logprobs = record["completion_token_ids"], record["behavior_logprobs"]
        record["completion_token_ids"] = [ids[0], OBSERVED, *ids]
        record["behavior_logprobs"] = [logprobs[0], 0.0, *logprobs]
        record["loss_mask"] = [True, False, *[True] * len(ids)]
        answer = [{"role": "user", "content": tokenizer.decode([OBSERVED])}]
        first = {"start": 0, "end": 1, "text": tokenizer.decode(ids[:1]), "messages": answer, "reward": 0.25}
        last = {"start": 2, "end": 2 + len(ids), "text": record["completion"]}
        won = {"win": float(record["sample_index"] == 0)}
        record["episode"] = {"turns": [first, last], "end": "terminated", "scores": won}
        for name in ("reward", "rewards", "advantages", "returns"):
            record.pop(name, None)

    return rewrite(path, add_turn)


@pytest.fixture
def tokenizer(config: Path) -> Tokenizer:
    return read_policy(load(str(config), [], {}).settings).tokenizer


@pytest.fixture
def played(loose: Path, tokenizer: Tokenizer) -> Path:
    return add_turns(loose, tokenizer)


def test_rewards_of_turns_are_computed_from_the_file_and_learned_from(
    played: Path, config: Path, tmp_path: Path
) -> None:
    scored = tmp_path / "scored.jsonl"
    options = ("score", "--config", config, "--role", "reward", "--input", played, "--out", scored)
    result = here(*options, *settings(*ENVIRONMENT))
    assert result.exit_code == 0, result.stderr
    for before, after in zip(records_of(played), records_of(scored), strict=True):
        win = before["episode"]["scores"]["win"]
        assert after["rewards"] == {"env": 0.25 + win} and after["reward"] == 2.0 * (0.25 + win)
        assert after["token_rewards"] == [0.5, *[0.0] * (len(before["loss_mask"]) - 2), 2.0 * win]
        assert after["episode"] == before["episode"]
    # Scored for whole samples, what the turns had is not left behind.
    for names, chosen in (
        (("env",), ("env.source=guess_number", "reward.functions=[]")),
        (("arithmetic", "arithmetic_format"), ()),
    ):
        as_whole = here(*options[:-3], scored, "--out", tmp_path / f"{names[0]}.jsonl", *settings(*chosen))
        assert as_whole.exit_code == 0, as_whole.stderr
        for record in records_of(tmp_path / f"{names[0]}.jsonl"):
            assert record["rewards"].keys() == {*names} and "token_rewards" not in record

    result = train_on(scored, config, *ENVIRONMENT)
    assert result.exit_code == 0, result.stderr
    assert "rewards: those of the samples" in result.stderr
    run = tmp_path / "runs" / "tiny"
    step = metrics_of(run)[-1]
    assert (step["reward/env/mean"], step["env/score/win"], step["episode/turns_mean"]) == (0.5, 0.25, 2.0)
    assert step["episode/end/terminated"] == 1.0 and step["episode/observed_tokens_mean"] == 1.0
    for record in records_of(step_file(run, 1)):
        assert record["advantages"][1] == record["returns"][1] == 0.0
        # In the first turn, the score counts half.
        win = 2.0 * record["episode"]["scores"]["win"]
        np.testing.assert_allclose(record["returns"], [0.5 + 0.5 * win, 0, *[win] * (len(record["returns"]) - 2)])
        assert [m["role"] for m in record["messages"][-3:]] == ["assistant", "user", "assistant"]


def test_without_an_episode_no_environment_can_reward(loose: Path, source: Path) -> None:
    rewrite(loose, lambda record: record.pop("reward"))
    with pytest.raises(InputError, match=r"env\.source: guess_number has none for samples without an episode"):
        looked(source, "env.source=guess_number", at=loose)


def test_the_text_of_every_turn_is_that_of_its_tokens(played: Path, source: Path) -> None:
    assert looked(source, *ENVIRONMENT, at=played).uses_saved_rewards is False
    rewrite(played, lambda record: record["episode"]["turns"][0].update(text="other"))
    with pytest.raises(InputError, match=r"completion_token_ids read .* and completion is 'other'"):
        looked(source, *ENVIRONMENT, at=played)


def test_a_sample_that_the_filter_of_a_run_had_masked_comes_back_without_its_observations(
    source: Path, tokenizer: Tokenizer
) -> None:
    path = add_turns(step_file(source, 1), tokenizer)
    rewrite(path, lambda record: record.update(loss_mask=[False] * len(record["loss_mask"]), token_rewards=None))
    groups = looked(source, *ENVIRONMENT).load_groups(1)
    for sample in (sample for group in groups for sample in group):
        assert sample.mask.tolist() == [True, False, *[True] * (len(sample.completion_ids) - 2)]
