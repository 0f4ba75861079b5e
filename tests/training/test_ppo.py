"""Tests PPO with adapters in whole runs: the critic, its warm-up, advantages, and a run that is killed."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from app.model.lora import LORA_A, LORA_B
from app.records.jsonl import write_jsonl
from settings import load
from tests import program
from tests.advantage.gae_oracle import Case, oracle
from tests.replays import step_file
from tests.run_fixtures import NO_REPORT, PPO, write_config


def write_ppo(folder: Path, model: Path) -> Path:
    text = PPO.replace("path: {model}", "path: {model}, lora: {{rank: 2}}")
    return write_config(folder, text + NO_REPORT, model)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Returns the directory of an uninterrupted run of four steps, which tests must not change."""
    folder = tmp_path_factory.mktemp("ppo")
    result = program.succeeded(program.train_here(write_ppo(folder, tiny_model)))
    assert "critic only" in result.stderr
    return folder / "runs" / "ppo"


@pytest.fixture
def config(tmp_path: Path, tiny_model: Path) -> Path:
    return write_ppo(tmp_path, tiny_model)


def part_of(run: Path, step: int, network: str) -> dict[str, np.ndarray]:
    state = program.saved_state(run, step)
    return {name: leaf for name, leaf in state.items() if name.startswith(f"['{network}']")}


def changed(run: Path, network: str, steps: tuple[int, int]) -> list[str]:
    before, after = (part_of(run, step, network) for step in steps)
    assert len(before) > 30
    return [name for name in before if not np.array_equal(before[name], after[name])]


def test_the_policy_with_moments_and_counters_is_frozen_while_the_critic_warms_up(whole: Path) -> None:
    (session,) = program.records_of(whole / "sessions.jsonl")
    assert session["devices"] == "8 × cpu"
    assert changed(whole, "policy", (1, 2)) == []
    assert any("num_updates" in name for name in changed(whole, "critic", (1, 2)))
    policy, critic = (part_of(whole, 4, network) for network in ("policy", "critic"))
    assert policy["['policy']['num_updates']"] == 2 * 4
    assert critic["['critic']['num_updates']"] == 4 * 4
    # All adapters of the policy change, and so do all weights of the critic, which has no adapters.
    adapters = [name for name, leaf in policy.items() if leaf.ndim]
    assert all(name.endswith((f"['{LORA_A}']", f"['{LORA_B}']")) for name in adapters)
    assert {*adapters} <= {*changed(whole, "policy", (2, 4))}
    assert len([name for name, leaf in critic.items() if leaf.ndim]) == 3 * 12
    assert {name for name, leaf in critic.items() if leaf.ndim} <= {*changed(whole, "critic", (1, 4))}
    frozen, learning = program.metrics_of(whole)[1], program.metrics_of(whole)[2]
    assert frozen["policy/grad_norm"] is None and frozen["loss"] is None
    assert frozen.keys() == learning.keys()
    assert learning["policy/grad_norm"] > 0 and frozen["value/grad_norm"] > 0 and frozen["value/loss"] > 0


def test_the_critic_has_its_own_learning_rate_and_clip_range(whole: Path) -> None:
    lines = program.metrics_of(whole)
    # Each step has four updates, of which the last is logged; the run has sixteen.
    rates = [1e-2 * (17 - 4 * step) / 16 for step in (1, 2, 3, 4)]
    np.testing.assert_allclose([line["value/learning_rate"] for line in lines], rates, rtol=1e-5)
    # The first update of a step changes no value, and this rate moves some of them beyond the range.
    assert all(0.05 < line["value/clip_fraction"] < 1 for line in lines)


def test_kl_coefficient_and_schedule_start_after_critic_warmup(whole: Path) -> None:
    coefficients = [line["policy/kl_coef"] for line in program.metrics_of(whole)]
    assert coefficients[:3] == [0.05] * 3 != coefficients[1:]
    rates = [line["policy/learning_rate"] for line in program.metrics_of(whole)]
    assert rates[:2] == [None, None] and rates[2] > rates[3] > 0


def test_advantages_of_penalized_rewards_equal_a_float64_oracle(whole: Path) -> None:
    chosen = load(str(whole / "settings.yaml"), [], {}).settings
    assert chosen.algorithm.lam is not None
    found, expected = [], []
    for record in program.records_of(step_file(whole, 4)):
        policy, reference = (np.array(record[f"{role}_logprobs"], float) for role in ("policy", "reference"))
        coefficient = program.metrics_of(whole)[3]["policy/kl_coef"]
        rewards = -coefficient * (policy - reference)
        rewards[-1] += record["reward"]
        # A truncated sample has one additional value, for the state after its last token.
        values = np.array(record["values"], float)
        behind = values[len(rewards) :].sum() if record["finish_reason"] == "length" else 0.0
        case = Case(rewards[None], np.append(values[: len(rewards)], behind)[None], None)
        advantages, returns = oracle(case, gamma=chosen.algorithm.gamma, lam=chosen.algorithm.lam, mask_mode="skip")
        np.testing.assert_allclose(record["returns"], returns[0], atol=1e-5)
        found.append(record["advantages"])
        expected.append(advantages[0])
    whitened = np.concatenate(expected)
    whitened = (whitened - whitened.mean()) / whitened.std(ddof=1)
    np.testing.assert_allclose(np.concatenate(found), whitened, atol=1e-4)


@pytest.mark.slow
def test_a_run_killed_during_critic_warmup_resumes_bit_for_bit(config: Path, whole: Path) -> None:
    """The remaining steps include warm-up, updates of the adapters and an adapted penalty; schedules end at step 4."""
    run = config.parent / "runs" / "ppo"
    with program.started("train", "--config", config) as process:
        program.wait_for_step(process, run, 2)
        os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=program.DEADLINE_S) == -signal.SIGKILL
    assert program.metrics_of(run)[-1]["step"] < 4
    result = program.succeeded(program.train_here(config, resume="auto"))
    assert "continuing after step" in result.stderr
    program.assert_same_run(run, whole, step=4)


def test_a_run_with_a_critic_is_not_resumed_without_a_critic(config: Path, whole: Path) -> None:
    run = config.parent / "runs" / "ppo"
    shutil.copytree(whole, run)
    before = program.digest_of(run)
    other = ("algorithm.name=reinforce_plus_plus", "run.steps=5")
    result = program.train_here(config, *other, resume="must", allow_changed=["algorithm"])
    assert result.exit_code == 2
    assert "the critic changed since this run was started" in result.stderr
    assert program.digest_of(run) == before


def test_the_critic_of_a_checkpoint_reproduces_the_values_of_its_run(whole: Path, tmp_path: Path) -> None:
    records = program.records_of(step_file(whole, 3))
    write_jsonl(tmp_path / "in.jsonl", [{k: v for k, v in one.items() if k != "values"} for one in records])
    values = []
    for step in ("2", "3"):
        files = ("--input", tmp_path / "in.jsonl", "--out", tmp_path / f"{step}.jsonl")
        program.succeeded(
            program.here("score", "--role", "critic", "--checkpoint", whole / "checkpoints" / step, *files)
        )
        scored = program.records_of(tmp_path / f"{step}.jsonl")
        # A truncated sample has one value more, since its last state is not terminal.
        for one in scored:
            assert len(one["values"]) == len(one["completion_token_ids"]) + (one["finish_reason"] == "length")
        values.append(np.concatenate([one["values"] for one in scored]))
    expected = np.concatenate([one["values"] for one in records])
    np.testing.assert_allclose(values[0], expected, atol=1e-5)
    assert np.abs(values[1] - expected).max() > 1e-3
