"""PPO through the whole corridor: what a critic adds to a run, and how one goes on from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.tiny_directory import write_model
from tests.training.conftest import NO_REPORT, write_config
from tests.training.program import assert_same_run, here, metrics_of, records_of, saved_state, settings, train_here

PPO = """\
run: {{dir: {runs}, name: ppo, steps: 4}}
model: {{path: {model}}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 8, group_size: 1, max_new_tokens: 4}}
reward: {{functions: [{{name: arithmetic_format, weight: 0.5}}]}}
algorithm:
  {{name: ppo, beta: 0.05, kl_target: 0.01, kl_horizon: 20, epochs: 2, mini_batch_prompts: 4, bootstrap_truncated: true}}
critic: {{warmup_steps: 2, learning_rate: 1e-2}}
optimizer: {{learning_rate: 1e-3}}
checkpoint: {{every_steps: 1, keep: 4, best_metric: null}}
eval: {{every_steps: 0}}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Four steps in one go. Not to be written to."""
    folder = tmp_path_factory.mktemp("ppo")
    result = train_here(write_config(folder, PPO + NO_REPORT, tiny_model))
    assert result.exit_code == 0, result.stderr
    assert "critic only" in result.stderr
    return folder / "runs" / "ppo"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    return write_config(tmp_path, PPO + NO_REPORT, tiny_model)


def part_of(run: Path, step: int, network: str) -> dict[str, np.ndarray]:
    state = saved_state(run, step)
    return {name: leaf for name, leaf in state.items() if name.startswith(f"['{network}']")}


def changed(run: Path, network: str, steps: tuple[int, int]) -> list[str]:
    before, after = (part_of(run, step, network) for step in steps)
    assert len(before) > 30
    return [name for name in before if not np.array_equal(before[name], after[name])]


def test_while_the_critic_warms_up_the_policy_stays_bitwise_as_it_is_its_counters_and_moments_too(whole: Path) -> None:
    assert changed(whole, "policy", (1, 2)) == []
    assert any("num_updates" in name for name in changed(whole, "critic", (1, 2)))
    assert len(changed(whole, "policy", (2, 3))) > 30
    policy, critic = (part_of(whole, 4, network) for network in ("policy", "critic"))
    assert policy["['policy']['num_updates']"] == 2 * 4
    assert critic["['critic']['num_updates']"] == 4 * 4


def test_what_the_policy_measures_is_null_while_it_is_frozen(whole: Path) -> None:
    frozen, learning = metrics_of(whole)[1], metrics_of(whole)[2]
    assert frozen["policy/grad_norm"] is None and frozen["loss"] is None
    assert frozen.keys() == learning.keys()
    assert learning["policy/grad_norm"] > 0 and frozen["value/grad_norm"] > 0
    assert frozen["value/loss"] > 0


def test_k_steps_and_a_resume_equal_all_steps_at_once(config: Path, whole: Path) -> None:
    """The second half starts in the middle: with the policy's first updates, and an adapted penalty."""
    run = config.parent / "runs" / "ppo"
    # The steps in between have to know of the whole run: schedules and warm-up end where it ends.
    assert train_here(config, "run.steps=3").exit_code == 0
    result = train_here(config, resume="must")
    assert result.exit_code == 0, result.stderr
    assert_same_run(run, whole, step=4)
    coefficients = [line["policy/kl_coef"] for line in metrics_of(run)]
    assert coefficients[0] == 0.05 and coefficients[3] != coefficients[1]


def test_a_run_without_a_critic_is_not_continued_with_one_nor_the_other_way_round(config: Path) -> None:
    assert train_here(config, "run.steps=1", "algorithm.name=reinforce_plus_plus").exit_code == 0
    before = sorted(path.name for path in (config.parent / "runs" / "ppo" / "checkpoints").iterdir())
    result = train_here(config, resume="must")
    assert result.exit_code == 2
    assert "the critic changed since this run was started" in result.stderr
    assert sorted(path.name for path in (config.parent / "runs" / "ppo" / "checkpoints").iterdir()) == before


def test_a_critic_with_another_tokenizer_is_refused(config: Path, tiny_model: Path) -> None:
    other = write_model(config.parent / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = train_here(config, f"critic.path={other}")
    assert result.exit_code == 2
    assert str(other) in result.stderr and str(tiny_model) in result.stderr
    assert "another tokenizer" in result.stderr
    assert not (config.parent / "runs").exists()


def test_a_critic_that_cannot_be_opened_is_named_by_its_own_setting(config: Path) -> None:
    result = train_here(config, "critic.path=./nowhere.gguf")
    assert result.exit_code == 2
    assert "critic.path" in result.stderr and "model.path" not in result.stderr


def test_the_critic_warm_up_must_end(config: Path) -> None:
    result = train_here(config, "critic.warmup_steps=4")
    assert result.exit_code == 2
    assert "critic.warmup_steps" in result.stderr and "at most 3" in result.stderr


def test_dry_run_counts_the_critic(config: Path) -> None:
    foreseen = here("train", "--config", config, "--dry-run", "--json")
    assert foreseen.exit_code == 0, foreseen.stderr
    report = json.loads(foreseen.stdout)
    memory = report["memory"]
    # Its head is one number for each of 32 dims, in place of 24 x 32.
    assert memory["update"]["weights"] - memory["update"]["critic"] == 4 * (24 * 32 - 32)
    assert memory["update"]["critic_optimizer"] > 2 * memory["update"]["critic"]
    assert memory["critic"]["gradients"] == memory["critic"]["critic"]
    assert memory["critic"]["activations"] > 0
    assert report["optimizer_steps"] == 2 * 4
    grpo = settings("algorithm.name=grpo", "rollout.group_size=2", "algorithm.kl_target=null")
    without = here("train", "--config", config, "--dry-run", "--json", *grpo)
    assert without.exit_code == 0, without.stderr
    assert "critic" not in json.loads(without.stdout)["memory"]["update"]


def test_score_adds_values_and_one_more_where_a_sample_was_cut(sampled: Path, tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "values.jsonl"
    arguments = ["--input", sampled, "--out", out, "--role", "critic", *settings(f"model.path={tiny_model}")]
    assert here("score", *arguments).exit_code == 0
    records = records_of(out)
    assert all(record["values"] == [0.0] * len(record["completion_token_ids"]) for record in records)
    result = here("score", *arguments, *settings("algorithm.bootstrap_truncated=true"))
    assert result.exit_code == 0, result.stderr
    for record in records_of(out):
        behind = 1 if record["finish_reason"] == "length" else 0
        assert len(record["values"]) == len(record["completion_token_ids"]) + behind
    assert {record["finish_reason"] for record in records} >= {"length"}
