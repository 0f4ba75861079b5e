"""Tests of PPO in whole runs: the critic, and resumption from a checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from app.batching.micro_batch_plan import MicroBatchPlan, SequenceLengths
from app.batching.micro_batcher import GlobalPlan, MicroBatcher
from app.checkpoint.train_progress import RunState
from app.records.sample import Sample
from app.tracking.console import ProgressDisplay
from app.tracking.timer import StepTimer
from app.training.learner import make_learner_group
from app.training.rollout_source import make_rollout_source
from app.training.setup import prepare_run
from app.training.step_stages import RewardStage, ScoreStage
from app.training.trainer import Trainer
from settings import load
from tests.program import (
    assert_same_run,
    digest_of,
    here,
    metrics_of,
    records_of,
    saved_state,
    settings,
    train_here,
)
from tests.run_fixtures import NO_REPORT, write_config
from tests.tiny_directory import write_model

PPO = """\
run: {{dir: {runs}, name: ppo, steps: 4}}
model: {{path: {model}}}
data: {{max_prompt_length: 16, num_problems: 40}}
rollout: {{prompts_per_step: 8, group_size: 1, max_new_tokens: 4}}
reward: {{functions: [{{name: arithmetic_format, weight: 0.5}}]}}
algorithm:
  {{name: ppo, beta: 0.05, kl_target: 0.01, epochs: 2,
   mini_batch_prompts: 4, bootstrap_truncated: true, max_tokens_per_device: 32}}
critic: {{warmup_steps: 2, learning_rate: 1e-2}}
optimizer: {{learning_rate: 1e-3, schedule: linear}}
checkpoint: {{every_steps: 1, keep: 4, best_metric: null}}
eval: {{every_steps: 0}}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A run of four steps without interruption, which tests must not change."""
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


def stopped_after(step: int, run: Path, whole: Path) -> None:
    """Makes `run` the state of `whole` if it had been killed in the next step."""
    shutil.copytree(whole, run)
    for saved in (run / "checkpoints").iterdir():
        if int(saved.name) > step:
            shutil.rmtree(saved)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:step]))


@pytest.mark.slow
def test_killed_while_the_critic_warms_up_it_ends_as_if_it_had_not_been(config: Path, whole: Path) -> None:
    """The remaining steps include warm-up, updates of the policy and an adapted penalty; schedules end at step 4."""
    run = config.parent / "runs" / "ppo"
    stopped_after(1, run, whole)
    result = train_here(config, resume="must")
    assert result.exit_code == 0, result.stderr
    assert "continuing after step 1 of 4" in result.stderr
    assert_same_run(run, whole, step=4)


def test_an_adapted_penalty_waits_for_the_policy_to_move(whole: Path) -> None:
    coefficients = [line["policy/kl_coef"] for line in metrics_of(whole)]
    assert coefficients[:3] == [0.05] * 3 != coefficients[1:]
    rates = [line["policy/learning_rate"] for line in metrics_of(whole)]
    assert rates[:2] == [None, None] and rates[2] > rates[3] > 0


class Noting(MicroBatcher):
    """A batcher that records which samples it was called with."""

    def __init__(self, cut: MicroBatcher, noted: list[list[str]]) -> None:
        self.cut, self.sequence_cost, self.noted = cut, cut.sequence_cost, noted

    def plan(self, lengths: SequenceLengths, *, num_devices: int) -> MicroBatchPlan:
        return self.cut.plan(lengths, num_devices=num_devices)

    def __call__(self, samples: Sequence[Sample], mesh: Mesh) -> GlobalPlan:
        self.noted.append([sample.uid for sample in samples])
        return super().__call__(samples, mesh)


def test_shuffled_mini_batches_are_scored_as_they_are_first_learned_from(config: Path) -> None:
    noted: dict[str, list[list[str]]] = {name: [] for name in ("policy", "reference", "critic", "update", "learn")}
    with prepare_run(load(str(config), ["critic.warmup_steps=0"], {}), resume="never") as launch:
        chosen, session = launch.resolved.settings, launch.session
        wired = make_learner_group(session.scoring)
        learning = replace(
            wired, score_batchers={role: Noting(cut, noted[role]) for role, cut in wired.score_batchers.items()}
        )
        assert learning.critic is not None and session.scoring.critic is not None
        for name, learner in (("update", learning.policy), ("learn", learning.critic)):
            learner.updater.micro_batcher = Noting(learner.updater.micro_batcher, noted[name])
        params = session.scoring.load_params()
        critic = learning.critic.initial_state(session.scoring.critic.load_params(session.mesh))
        state = RunState(learning.policy.initial_state(jax.tree.map(jnp.copy, params)), critic, kl_coef=0.05)
        source = make_rollout_source(session, launch.inputs.prompts, max_rounds=1)
        reward = RewardStage(launch.rewards.compute_rewards, chosen.run.steps)
        score = ScoreStage(session.scoring, learning.score_batchers, params)
        trainer = Trainer(session, source, reward, score, learning, launch.rewards)
        timer = StepTimer(ProgressDisplay(num_steps=1, first_step=0, enabled=False))
        _, samples, metrics = trainer.step(state, step=1, position=0, timer=timer)
    first, second = noted["policy"]
    assert first + second != [sample.uid for sample in samples]
    # Two epochs of two mini-batches, of which the first two are those that were scored.
    assert noted["reference"] == noted["critic"] == noted["update"][:2] == noted["learn"][:2] == [first, second]
    assert len(noted["update"]) == 4
    # So the first update finds the logprobs that were scored, to the bit.
    apart = [np.abs(s.policy_logprobs - s.behavior_logprobs).max() for s in samples if s.uid in first]
    assert metrics["rollout/sampler_scorer_logprob_diff_max"] == max(apart)


def test_a_run_with_a_critic_is_not_continued_without_one(config: Path, whole: Path) -> None:
    run = config.parent / "runs" / "ppo"
    shutil.copytree(whole, run)
    before = digest_of(run)
    result = train_here(
        config, "algorithm.name=reinforce_plus_plus", "run.steps=5", resume="must", allow_changed=["algorithm"]
    )
    assert result.exit_code == 2
    assert "the critic changed since this run was started" in result.stderr
    assert digest_of(run) == before


def test_a_critic_with_another_tokenizer_is_refused(config: Path, tiny_model: Path) -> None:
    other = write_model(config.parent / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    result = train_here(config, f"critic.path={other}")
    assert result.exit_code == 2
    assert str(other) in result.stderr and str(tiny_model) in result.stderr
    assert "critic.path: the tokenizer of" in result.stderr
    assert not (config.parent / "runs").exists()


def test_the_critic_warm_up_must_end(config: Path) -> None:
    result = train_here(config, "critic.warmup_steps=4")
    assert result.exit_code == 2
    assert "critic.warmup_steps" in result.stderr and "at most 3" in result.stderr


def test_score_adds_values_and_one_more_where_a_sample_was_cut(sampled: Path, tmp_path: Path, tiny_model: Path) -> None:
    out = tmp_path / "values.jsonl"
    arguments = ["--input", sampled, "--out", out, "--role", "critic", *settings(f"model.path={tiny_model}")]
    assert here("score", *arguments).exit_code == 0
    records = records_of(out)
    assert all(record["values"] == [0.0] * len(record["completion_token_ids"]) for record in records)
    result = here("score", *arguments, "--overwrite", *settings("algorithm.bootstrap_truncated=true"))
    assert result.exit_code == 0, result.stderr
    for record in records_of(out):
        behind = 1 if record["finish_reason"] == "length" else 0
        assert len(record["values"]) == len(record["completion_token_ids"]) + behind
    assert {record["finish_reason"] for record in records} >= {"length"}
