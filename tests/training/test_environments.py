"""Tests of runs whose samples have several turns."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.games import SOURCE
from tests.program import assert_same_run, here, metrics_of, records_of, settings, train_here
from tests.replays import replayed, step_file
from tests.run_fixtures import NO_REPORT, write_config
from tests.training.test_async_training import SCHEDULED
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


def test_a_resumed_run_is_the_same_whatever_the_latencies(finished: Path, config: Path, tmp_path: Path) -> None:
    chosen = (f"run.dir={tmp_path}",)
    assert train_here(config, *chosen, "run.steps=2").exit_code == 0
    result = train_here(config, *chosen, resume="must")
    assert result.exit_code == 0, result.stderr
    assert_same_run(tmp_path / "tiny", finished, step=4)


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


@pytest.mark.slow
def test_samples_drawn_during_training_keep_their_turns_and_a_replay_learns_the_same(
    config: Path, tmp_path: Path
) -> None:
    ahead = (*SCHEDULED, "rollout.max_staleness=1", "rollout.slots=auto", "rollout.mode=fast", "run.steps=2")
    result = train_here(config, *ahead, f"run.dir={tmp_path / 'runs'}")
    assert result.exit_code == 0, result.stderr
    run = tmp_path / "runs" / "tiny"
    for record in (record for step in (1, 2) for record in records_of(step_file(run, step))):
        turns, written = record["episode"]["turns"], np.zeros(len(record["loss_mask"]), bool)
        for turn in turns:
            written[turn["start"] : turn["end"]] = True
        assert record["loss_mask"] == written.tolist()
        assert len(turns) == 3 or record["finish_reason"] == "length"
    again = replayed(run, tmp_path / "again")
    assert_same_state(again, run, step=2)
    for was, line in zip(metrics_of(run), metrics_of(again), strict=True):
        assert {name: line[name] for name in line if name.startswith(("eval/", "episode/", "reward/"))} == {
            name: was[name] for name in was if name.startswith(("eval/", "episode/", "reward/"))
        }


def test_a_replay_needs_no_environment(finished: Path, tmp_path: Path) -> None:
    run = replayed(finished / "rollouts", tmp_path, "env.source=calculator", "eval.every_steps=0")
    assert_same_state(run, finished, step=4)


BUSY_WORKERS = (
    *("rollout.slots=null", "rollout.scheduler=adaptive", "rollout.max_staleness=1", "rollout.workers.heavy.slots=4"),
    *("rollout.workers.fast.count=4", "rollout.workers.heavy.count=4"),
)


@pytest.mark.slow
def test_evaluations_play_beside_busy_workers_and_in_a_replay_without_them(config: Path, tmp_path: Path) -> None:
    result = train_here(config, *BUSY_WORKERS, f"run.dir={tmp_path}", "run.steps=2")
    assert result.exit_code == 0, result.stderr
    run, again = tmp_path / "tiny", replayed(tmp_path / "tiny" / "rollouts", tmp_path / "again")
    of_run, of_replay = ([line.get("eval/accuracy") for line in metrics_of(one)] for one in (run, again))
    assert of_run == of_replay and any(of_run)


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["trajectory", "turn"])
def test_ppo_learns_from_turns(credit: str, config: Path, tmp_path: Path) -> None:
    result = train_here(config, *PPO, f"env.credit={credit}", f"run.dir={tmp_path}", "run.steps=2")
    assert result.exit_code == 0, result.stderr
    [record, *_] = [one for one in records_of(step_file(tmp_path / "tiny", 2)) if one["finish_reason"] == "stop"]
    turns = record["episode"]["turns"]
    rewards = np.zeros(len(record["completion_token_ids"]))
    if credit == "turn":
        for turn in turns:
            rewards[turn["end"] - 1] += turn["reward"]
        rewards[turns[-1]["end"] - 1] += 0.5
        np.testing.assert_allclose(record["token_rewards"], rewards)
    else:
        assert "token_rewards" not in record
    assert record["reward"] == pytest.approx(sum(turn["reward"] for turn in turns) + 0.5)


@pytest.mark.slow
def test_evaluations_play_too_and_can_be_compared(finished: Path, config: Path, tmp_path: Path) -> None:
    chosen = settings("eval.num_prompts=6", "eval.num_samples=2", "eval.temperature=1.0")
    for name, checkpoint in (("before", "2"), ("after", "4")):
        result = here(
            *("evaluate", "--config", config, *chosen, "--checkpoint", finished / "checkpoints" / checkpoint),
            *("--out", tmp_path / f"{name}.jsonl", "--json"),
        )
        assert result.exit_code == 0, result.stderr
        assert json.loads(result.stdout)["metrics"]["eval/accuracy"] > 0
        assert {len(one["episode"]["turns"]) for one in records_of(tmp_path / f"{name}.jsonl")} <= {1, 2, 3}
    result = here("evaluate", "--compare", tmp_path / "before.jsonl", tmp_path / "after.jsonl")
    assert result.exit_code == 0, result.stderr
