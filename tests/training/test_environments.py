"""Tests of runs whose samples have several turns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.games import SOURCE
from tests.program import metrics_of, records_of, train_here
from tests.replays import replayed, step_file
from tests.run_fixtures import NO_REPORT, write_config
from tests.training.test_replay import assert_same_state

RUN = """\
run: {{dir: {runs}, name: tiny, steps: 4}}
model: {{path: builtin:tiny}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 4, group_size: 4, max_new_tokens: 48, slots: 16, mode: exact}}
optimizer: {{learning_rate: 1e-3}}
checkpoint: {{every_steps: 2}}
eval: {{every_steps: 2, num_prompts: 16}}
"""
PPO = (
    "algorithm.name=ppo",
    "algorithm.beta=0.05",
    "algorithm.mini_batch_prompts=2",
    "algorithm.bootstrap_truncated=true",
)


@pytest.fixture(scope="module")
def config(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "games.py").write_text(SOURCE)
    return write_config(folder, RUN + NO_REPORT + f"env: {{{{source: '{folder / 'games.py'}:Even'}}}}\n", tiny_model)


@pytest.fixture(scope="module")
def finished(config: Path) -> Path:
    result = train_here(config)
    assert result.exit_code == 0, result.stderr
    return config.parent / "runs" / "tiny"


def test_a_run_learns_from_turns_and_evaluates_with_the_environment(finished: Path) -> None:
    lines = metrics_of(finished)
    steps = [line for line in lines if "episode/turns_mean" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["episode/turns_mean"] > 1 and line["episode/observed_tokens_mean"] > 1 for line in steps)
    assert max(line["rollout/sampler_scorer_logprob_diff_mean"] for line in steps) < 1e-5
    assert all(0 < line["eval/accuracy"] <= 3.5 for line in lines if "eval/accuracy" in line)
    [record, *_] = records_of(step_file(finished, 1))
    assert [message["role"] for message in record["messages"]] == ["user", *["assistant", "user"] * 3]
    assert np.asarray(record["advantages"])[~np.asarray(record["loss_mask"])].tolist() == [0.0] * (
        len(record["loss_mask"]) - sum(record["loss_mask"])
    )


def test_equal_uids_in_training_and_evaluation_are_games_of_their_own(config: Path, tmp_path: Path) -> None:
    data = {"data.source": "1", "data.eval_source": "2"}
    for name, answer in data.items():
        path = tmp_path / name / "rows.jsonl"
        path.parent.mkdir()
        path.write_text("".join(json.dumps({"prompt": f"{n}+1=?", "answer": answer}) + "\n" for n in range(4)))
    sources = [f"{name}={tmp_path / name / 'rows.jsonl'}" for name in data]
    told = f"env.source={config.parent / 'games.py'}:Told"
    result = train_here(config, *sources, told, f"run.dir={tmp_path}", "run.steps=1", "eval.every_steps=1")
    assert result.exit_code == 0, result.stderr
    files = sorted((tmp_path / "tiny" / "eval").glob("*.jsonl")), [step_file(tmp_path / "tiny", 1)]
    for of_kind, reward in zip(files, (2.0, 1.0), strict=True):
        ended = [one for file in of_kind for one in records_of(file) if one["episode"]["end"] == "terminated"]
        assert {one["episode"]["turns"][0]["reward"] for one in ended} == {reward}
        assert {one["uid"].rpartition("/")[0] for one in ended} <= {f"rows/{n}" for n in range(4)}


def test_a_replay_needs_no_environment(finished: Path, tmp_path: Path) -> None:
    run = replayed(finished / "rollouts", tmp_path, "env.source=calculator", "eval.every_steps=0")
    assert_same_state(run, finished, step=4)


@pytest.mark.slow
def test_ppo_learns_from_turns(config: Path, tmp_path: Path) -> None:
    result = train_here(config, *PPO, "env.credit=turn", f"run.dir={tmp_path}", "run.steps=2")
    assert result.exit_code == 0, result.stderr
    [record, *_] = [one for one in records_of(step_file(tmp_path / "tiny", 2)) if one["finish_reason"] == "stop"]
    turns = record["episode"]["turns"]
    rewards = np.zeros(len(record["completion_token_ids"]))
    for turn in turns:
        rewards[turn["end"] - 1] += turn["reward"]
    rewards[turns[-1]["end"] - 1] += 0.5
    np.testing.assert_allclose(record["token_rewards"], rewards)
    assert record["reward"] == pytest.approx(sum(turn["reward"] for turn in turns) + 0.5)
