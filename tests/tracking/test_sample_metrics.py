"""Tests of the metrics of a step against hand-computed values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.advantage.advantage_metrics import AdvantageMoments, advantage_metrics
from app.batching.micro_batch_plan import SequenceLengths
from app.mesh.devices import host_memory_bytes
from app.mesh.program_cache import CompilationCounter
from app.model.decoder import Decoder, DecoderDefinition, ValueDecoder
from app.records.sample import Prompt, Sample
from app.rollout.counters import RolloutCounters
from app.tracking.performance import StepFlops, network_pass, rollout_performance, step_performance
from app.tracking.sample_metrics import mismatch_metrics, sample_metrics
from tests.tiny import ODD

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


def test_flops_of_a_step_by_hand() -> None:
    # ODD: 2 layers, D 36, F 44, 6 query and 3 key/value heads of 10.
    matrices = 2 * 2 * (36 * 60 + 2 * 36 * 30 + 60 * 36 + 3 * 36 * 44)
    pair, head = 2 * 4 * 6 * 10, 2 * 36 * ODD.vocab_size
    policy, classifier = (DecoderDefinition.create(ODD, network) for network in (Decoder, ValueDecoder))
    lengths = SequenceLengths(np.array([2, 2, 3]), np.array([1, 3, 2]), np.array([0, 0, 1]))
    # Pairs of prompts: 1+2 twice and 1+2+3; of the tokens behind them: 3, 3+4+5 and 4+5.
    each = matrices * (7 + 6) + pair * (3 + 3 + 6 + 3 + 12 + 9) + head * 6
    once = each - 2 * matrices - 3 * pair
    alone, shared = (network_pass(policy, shares_prompts=shares) for shares in (False, True))
    assert alone.total(lengths) == each and shared.total(lengths) == once
    update = network_pass(policy, shares_prompts=False, updates=2)
    assert update.total(lengths) == 2 * 3 * each
    judged = SequenceLengths(np.array([1]), np.array([3]), np.array([0]))
    reward = network_pass(classifier, shares_prompts=False)
    assert reward.total(judged) == 4 * matrices + pair * (1 + 2 + 3 + 4)
    work = StepFlops(rollout=shared, passes=(alone, update), reward_model=reward)
    learning = 7 * each + 2 * reward.total(judged)
    assert work.total(sampled=lengths, learned=lengths, rewarded=[judged, judged]) == once + learning
    assert work.total(sampled=None, learned=lengths, rewarded=[judged, judged]) == learning


def test_mismatch_of_sampler_and_trainer_by_hand() -> None:
    def scored(behavior: list[float], policy: list[float], mask: list[bool]) -> Sample:
        columns = {"behavior_logprobs": behavior, "policy_logprobs": policy}
        return replace(
            sample(0, 1.0, [0.0] * len(mask), mask=mask), **{k: np.array(v, np.float32) for k, v in columns.items()}
        )

    samples = [
        scored([-1.0, -3.0, -9.0], [-1.5, -2.0, 0.0], [True, True, False]),
        scored([-0.5], [-1.0], [True]),
        scored([-5.0], [-7.0], [False]),
        sample(0, 1.0, [0.0]),
    ]
    d = np.array([0.5, -1.0, 0.5])
    assert mismatch_metrics(samples) == pytest.approx(
        {
            "mismatch/training_ppl": (np.exp(1.75) + np.exp(1.0)) / 2,
            "mismatch/rollout_ppl": (np.exp(2.0) + np.exp(0.5)) / 2,
            "mismatch/log_ppl_diff": (-0.25 + 0.5) / 2,
            "mismatch/kl": 0.0,
            "mismatch/k3_kl": (np.exp(-d) + d - 1).mean(),
        }
    )
    assert mismatch_metrics(samples[2:]) == {}


def test_utilization_is_not_claimed_where_the_peak_is_unknown() -> None:
    performance = step_performance([sample(0, 1.0, [0.0, 0.0])], flops=1e9, seconds=4.0)
    assert performance["perf/mfu"] is None
    assert performance["perf/tokens_per_s"] == 0.5


def test_a_container_may_use_what_it_is_allowed_to(tmp_path: Path) -> None:
    installed = host_memory_bytes(tmp_path / "absent")
    (tmp_path / "limit").write_text("1048576\n")
    assert host_memory_bytes(tmp_path / "limit") == 1 << 20
    (tmp_path / "limit").write_text("max\n")
    assert host_memory_bytes(tmp_path / "limit") == installed > 1 << 30


def test_metrics_of_acting_rows_are_there_if_there_were_some() -> None:
    assert "perf/rollout/resumes" not in rollout_performance(RolloutCounters())
    found = rollout_performance(RolloutCounters(resumed_rows=2, rebuilt_rows=1))
    assert (found["perf/rollout/resumes"], found["perf/rollout/rebuilds"]) == (2, 1)
