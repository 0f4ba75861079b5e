"""Tests runs whose samples have several turns, and stages that read such samples from files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.prompts.tokenizer import Tokenizer
from app.runtime.inputs import read_policy
from settings import load
from settings.errors import InputError
from tests.games import SOURCE
from tests.program import assert_same_state, here, metrics_of, records_of, run_of, settings, succeeded, train_here
from tests.replays import looked, replayed, rewrite, step_file, train_on
from tests.run_fixtures import NO_REPORT, write_config

RUN = """\
run: {{dir: {runs}, name: tiny, steps: 2}}
model: {{path: builtin:tiny}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 4, group_size: 4, max_new_tokens: 48, slots: 16, mode: exact}}
optimizer: {{learning_rate: 1e-3}}
checkpoint: {{every_steps: 2}}
eval: {{every_steps: 2, num_prompts: 16}}
"""


@pytest.fixture(scope="module")
def played_config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "games.py").write_text(SOURCE)
    return write_config(folder, RUN + NO_REPORT + f"env: {{{{source: '{folder / 'games.py'}:Even'}}}}\n", tiny_model)


@pytest.fixture(scope="module")
def played_run(played_config: Path) -> Path:
    succeeded(train_here(played_config))
    return run_of(played_config)


def test_a_run_trains_on_turns_and_evaluates_with_the_environment(played_run: Path) -> None:
    lines = metrics_of(played_run)
    steps = [line for line in lines if "episode/turns_mean" in line]
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["episode/turns_mean"] > 1 and line["episode/observed_tokens_mean"] > 1 for line in steps)
    assert max(line["rollout/sampler_scorer_logprob_diff_mean"] for line in steps) < 1e-5
    assert all(0 < line["eval/accuracy"] <= 3.5 for line in lines if "eval/accuracy" in line)
    [record, *_] = records_of(step_file(played_run, 1))
    assert [message["role"] for message in record["messages"]] == ["user", *["assistant", "user"] * 3]
    mask = np.asarray(record["loss_mask"])
    assert not mask.all() and not np.asarray(record["advantages"])[~mask].any()


def test_equal_uids_in_training_and_evaluation_have_separate_episodes(played_config: Path, tmp_path: Path) -> None:
    data = {"data.source": "1", "data.eval_source": "2"}
    for name, answer in data.items():
        path = tmp_path / name / "rows.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"prompt": f"{n}+1=?", "answer": answer}) + "\n" for n in range(4)))
    sources = [f"{name}={tmp_path / name / 'rows.jsonl'}" for name in data]
    told = f"env.source={played_config.parent / 'games.py'}:Told"
    succeeded(train_here(played_config, *sources, told, f"run.dir={tmp_path}", "run.steps=1", "eval.every_steps=1"))
    files = sorted((tmp_path / "tiny" / "eval").glob("*.jsonl")), [step_file(tmp_path / "tiny", 1)]
    for of_kind, reward in zip(files, (2.0, 1.0), strict=True):
        ended = [one for file in of_kind for one in records_of(file) if one["episode"]["end"] == "terminated"]
        assert {one["episode"]["turns"][0]["reward"] for one in ended} == {reward}
        assert {one["uid"].rpartition("/")[0] for one in ended} <= {f"rows/{n}" for n in range(4)}


def test_a_replay_needs_no_environment(played_run: Path, tmp_path: Path) -> None:
    run = replayed(played_run / "rollouts", tmp_path, "env.source=calculator", "eval.every_steps=0")
    assert_same_state(run, played_run, step=2)


ENVIRONMENT = (
    *("env.source=guess_number", "env.credit=turn", "env.weight=2.0", "env.turn_discount=0.5"),
    *("reward.functions=[]", "algorithm.name=reinforce_plus_plus", "rollout.max_new_tokens=8", "run.steps=1"),
)
OBSERVED = 5


def add_turns(path: Path, tokenizer: Tokenizer) -> Path:
    """Makes the first token of every sample a separate turn with an observation of one token; removes all rewards."""

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


def test_turn_rewards_are_computed_from_a_file_and_trained_on(played: Path, config: Path, tmp_path: Path) -> None:
    scored = tmp_path / "scored.jsonl"
    options = ("score", "--config", config, "--role", "reward", "--input")
    succeeded(here(*options, played, "--out", scored, *settings(*ENVIRONMENT)))
    for before, after in zip(records_of(played), records_of(scored), strict=True):
        win = before["episode"]["scores"]["win"]
        assert after["rewards"] == {"env": 0.25 + win} and after["reward"] == 2.0 * (0.25 + win)
        assert after["token_rewards"] == [0.5, *[0.0] * (len(before["loss_mask"]) - 2), 2.0 * win]
        assert after["episode"] == before["episode"]
    # If whole samples are scored, the rewards of their turns are removed.
    succeeded(here(*options, scored, "--out", tmp_path / "whole.jsonl"))
    for record in records_of(tmp_path / "whole.jsonl"):
        assert record["rewards"].keys() == {"arithmetic", "arithmetic_format"} and "token_rewards" not in record

    result = succeeded(train_on(scored, config, *ENVIRONMENT))
    assert "rewards: taken from the samples" in result.stderr
    run = tmp_path / "runs" / "tiny"
    step = metrics_of(run)[-1]
    assert (step["reward/env/mean"], step["env/score/win"], step["episode/turns_mean"]) == (0.5, 0.25, 2.0)
    assert step["episode/end/terminated"] == 1.0 and step["episode/observed_tokens_mean"] == 1.0
    for record in records_of(step_file(run, 1)):
        assert record["advantages"][1] == record["returns"][1] == 0.0
        # The turn discount of 0.5 halves the final score in the return of the first turn.
        win = 2.0 * record["episode"]["scores"]["win"]
        np.testing.assert_allclose(record["returns"], [0.5 + 0.5 * win, 0, *[win] * (len(record["returns"]) - 2)])
        assert [m["role"] for m in record["messages"][-3:]] == ["assistant", "user", "assistant"]


def test_samples_without_environment_rewards_are_refused_by_a_replay(
    played: Path, source: Path, tmp_path: Path
) -> None:
    assert looked(source, *ENVIRONMENT, at=played).uses_saved_rewards is False
    rewrite(played, lambda record: record["episode"]["turns"][0].update(text="other"))
    with pytest.raises(InputError, match=r"completion_token_ids decode to .* but completion is 'other'"):
        looked(source, *ENVIRONMENT, at=played)
    alone = rewrite(step_file(source, 1), lambda record: record.pop("reward")).rename(tmp_path / "alone.jsonl")
    with pytest.raises(InputError, match=r"samples without an episode have none from env\.source: guess_number"):
        looked(source, "env.source=guess_number", at=alone)


def test_a_filtered_sample_returns_to_the_loss_without_its_observations(source: Path, tokenizer: Tokenizer) -> None:
    path = add_turns(step_file(source, 1), tokenizer)
    rewrite(path, lambda record: record.update(loss_mask=[False] * len(record["loss_mask"]), token_rewards=None))
    groups = looked(source, *ENVIRONMENT).load_groups(1)
    for sample in (sample for group in groups for sample in group):
        assert sample.mask.tolist() == [True, False, *[True] * (len(sample.completion_ids) - 2)]
