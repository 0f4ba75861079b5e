"""Tests of the metrics of a step against hand-computed values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.advantage.metrics import AdvantageMoments, advantage_metrics
from app.mesh.device_memory import host_memory_bytes, peak_memory_bytes
from app.records.sample import Prompt, Sample
from app.tracking.compilation_counter import CompilationCounter
from app.tracking.flops import NetworkPass, StepFlops, TokenCounts
from app.tracking.metrics import sample_metrics
from app.tracking.performance import step_performance

FUNCTIONS = ("arithmetic", "arithmetic_format")


def sample(group: int, reward: float, advantages: list[float], *, stop: bool = True, mask: list[bool] | None = None):
    length = len(advantages)
    return Sample(
        prompt=Prompt(f"p{group}", np.array([1, 2], np.int32), "?", "1"),
        sample_index=0,
        group_id=group,
        completion_ids=np.zeros(length, np.int32),
        completion="",
        behavior_logprobs=np.zeros(length, np.float32),
        finish_reason="stop" if stop else "length",
        policy_version=0,
        loss_mask=None if mask is None else np.array(mask),
        rewards={"arithmetic": float(reward >= 1), "arithmetic_format": 1.0},
        reward=reward,
        advantages=np.array(advantages, np.float32),
    )


def test_a_step_of_two_groups() -> None:
    metrics = sample_metrics(
        [
            sample(0, 1.5, [1.0]),
            sample(0, 0.5, [-1.0, -1.0, -1.0]),
            sample(1, 0.5, [0.0, 0.0], stop=False),
            sample(1, 0.5, [0.0, 0.0]),
        ],
        FUNCTIONS,
    )
    assert metrics == pytest.approx(
        {
            "reward/mean": 0.75,
            "reward/std": np.sqrt(0.1875),
            "reward/zero_variance_fraction": 0.5,
            "reward/arithmetic/mean": 0.25,
            "reward/arithmetic_format/mean": 1.0,
            "completions/mean_length": 2.0,
            "completions/min_length": 1.0,
            "completions/max_length": 3.0,
            "completions/truncated_fraction": 0.25,
        }
    )


def test_advantages_are_counted_token_by_token_where_the_policy_wrote() -> None:
    samples = [sample(0, 1.0, [2.0, 9.0, 4.0], mask=[True, False, True]), sample(0, 0.0, [-3.0])]
    metrics = advantage_metrics(AdvantageMoments.from_samples(samples))
    assert metrics == pytest.approx({"advantage/mean": 1.0, "advantage/std": np.sqrt((1 + 9 + 16) / 3)})
    nothing = {"advantage/mean": 0.0, "advantage/std": 0.0}
    for empty in ([sample(0, 1.0, [0.0], mask=[False])], []):
        assert advantage_metrics(AdvantageMoments.from_samples(empty)) == nothing


def test_a_critic_is_measured_by_the_variance_that_it_leaves() -> None:
    def sample_with_values(values: list[float], returns: list[float], mask: list[bool]) -> Sample:
        made = sample(0, 1.0, [0.0] * len(returns), mask=mask)
        return replace(made, values=np.array(values, np.float32), returns=np.array(returns, np.float32))

    # The value behind the last token of the first, and the masked token of the second, count nowhere.
    samples = [sample_with_values([1, 2, 50], [1, 3], [True, True]), sample_with_values([5, 70], [5, 0], [True, False])]
    metrics = advantage_metrics(AdvantageMoments.from_samples(samples))
    assert metrics["returns/mean"] == 3.0
    assert metrics["returns/std"] == pytest.approx(np.sqrt(8 / 3))
    # Errors 0 1 0 around 1/3, returns 1 3 5 around 3.
    assert metrics["value/explained_variance"] == pytest.approx(1 - (2 / 3) / 8)
    flat = advantage_metrics(AdvantageMoments.from_samples([sample_with_values([1, 2], [3, 3], [True, True])]))
    assert flat["returns/std"] == 0 and np.isnan(flat["value/explained_variance"])
    without_critic = replace(samples[0], values=None)
    assert advantage_metrics(AdvantageMoments.from_samples([without_critic])).keys() == metrics.keys() - {
        "value/explained_variance"
    }


def test_compilations_are_counted_until_the_counter_is_closed() -> None:
    counter = CompilationCounter()
    double = jax.jit(lambda x: x * 2)
    small, large = jnp.ones(3), jnp.ones(5)
    counter.take_count()
    double(small)
    assert counter.take_count() == 1
    double(small)
    assert counter.take_count() == 0
    double(large)
    counter.close()
    assert counter.take_count() == 1
    double(jnp.ones(7))
    assert counter.take_count() == 0


def test_flops_count_a_prompt_once_per_group_where_it_passes_once_and_every_round_of_sampling() -> None:
    sampled, learned = TokenCounts(prompt=24, completion=18), TokenCounts(prompt=8, completion=6)
    passes = (NetworkPass(20, shares_prompts=False), NetworkPass(120, shares_prompts=True))
    work = StepFlops(group_size=4, rollout=NetworkPass(20, shares_prompts=True), passes=passes)
    expected = 20 * (18 + 24 / 4) + 20 * (6 + 8) + 120 * (6 + 8 / 4)
    assert work.total(sampled=sampled, learned=learned) == expected


def test_tokens_are_those_of_all_samples_of_each_part() -> None:
    ones = [sample(0, 1.0, [0.0] * 3), sample(0, 1.0, [0.0])]
    assert TokenCounts.count_over_hosts(ones, []) == [TokenCounts(prompt=4, completion=4), TokenCounts(0, 0)]


def test_utilization_is_not_claimed_where_the_peak_is_unknown() -> None:
    performance = step_performance([sample(0, 1.0, [0.0, 0.0])], flops=1e9, seconds=4.0)
    assert performance["perf/mfu"] is None
    assert performance["perf/tokens_per_s"] == 0.5


def test_peak_memory_of_this_process_is_plausible() -> None:
    assert 10 * 2**20 < peak_memory_bytes() < 2**40


def test_a_container_may_use_what_it_is_allowed_to(tmp_path: Path) -> None:
    installed = host_memory_bytes(tmp_path / "absent")
    (tmp_path / "limit").write_text("1048576\n")
    assert host_memory_bytes(tmp_path / "limit") == 1 << 20
    (tmp_path / "limit").write_text("max\n")
    assert host_memory_bytes(tmp_path / "limit") == installed > 1 << 30
