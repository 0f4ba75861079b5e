"""Tests the metrics of a step against hand-computed values."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from app.advantage.advantage_metrics import AdvantageMoments, advantage_metrics
from app.batching.micro_batch_plan import SequenceLengths
from app.mesh.devices import host_memory_bytes
from app.model.decoder import Decoder, DecoderDefinition, ValueDecoder
from app.records.sample import Sample
from app.rollout.counters import RolloutCounters
from app.tracking.performance import StepFlops, network_pass, rollout_performance, step_performance
from app.tracking.sample_metrics import MAX_NAMES, episode_metrics, mismatch_metrics, sample_metrics
from tests.episodes import with_turns
from tests.tiny import ODD, make_sample

FUNCTIONS = ("arithmetic", "arithmetic_format")


def sample(group: int, reward: float, advantages: list[float], *, stop: bool = True, mask: list[bool] | None = None):
    made = make_sample(np.zeros(len(advantages)), group_id=group, reward=reward)
    return replace(
        made,
        finish_reason="stop" if stop else "length",
        loss_mask=None if mask is None else np.array(mask),
        rewards={"arithmetic": float(reward >= 1), "arithmetic_format": 1.0},
        advantages=np.array(advantages, np.float32),
    )


def test_sample_metrics_of_two_groups_equal_hand_computed_values() -> None:
    samples = [sample(0, 1.5, [1.0]), sample(0, 0.5, [-1.0] * 3), sample(1, 0.5, [0.0] * 2, stop=False)]
    lengths = {"mean_length": 2.0, "min_length": 1.0, "max_length": 3.0, "truncated_fraction": 0.25}
    samples.append(sample(1, 0.5, [0.0] * 2))
    assert sample_metrics(samples, FUNCTIONS, lambda sample: True) == pytest.approx(
        {
            **{"reward/mean": 0.75, "reward/std": np.sqrt(0.1875), "reward/zero_variance_fraction": 0.5},
            **{"reward/arithmetic/mean": 0.25, "reward/arithmetic_format/mean": 1.0},
            **{f"completions/{name}": value for name, value in lengths.items()},
        }
    )


def test_zero_variance_fraction_ignores_samples_excluded_from_the_comparison() -> None:
    samples = [sample(0, 1.0, [1.0]), sample(0, 1.0, [1.0]), sample(0, 0.0, [1.0], stop=False)]
    metrics = sample_metrics(samples, FUNCTIONS, lambda sample: sample.finish_reason == "stop")
    assert metrics["reward/zero_variance_fraction"] == 1.0
    assert metrics["reward/mean"] == pytest.approx(2 / 3)


def test_advantage_metrics_are_over_unmasked_tokens() -> None:
    samples = [sample(0, 1.0, [2.0, 9.0, 4.0], mask=[True, False, True]), sample(0, 0.0, [-3.0])]
    metrics = advantage_metrics(AdvantageMoments.from_samples(samples))
    assert metrics == pytest.approx({"advantage/mean": 1.0, "advantage/std": np.sqrt((1 + 9 + 16) / 3)})
    nothing = {"advantage/mean": 0.0, "advantage/std": 0.0}
    for empty in ([sample(0, 1.0, [0.0], mask=[False])], []):
        assert advantage_metrics(AdvantageMoments.from_samples(empty)) == nothing


def test_explained_variance_equals_a_hand_computed_value() -> None:
    def sample_with_values(values: list[float], returns: list[float], mask: list[bool]) -> Sample:
        made = sample(0, 1.0, [0.0] * len(returns), mask=mask)
        return replace(made, values=np.array(values, np.float32), returns=np.array(returns, np.float32))

    # The value after the last token of the first sample and the masked token of the second are not counted.
    samples = [sample_with_values([1, 2, 50], [1, 3], [True, True]), sample_with_values([5, 70], [5, 0], [True, False])]
    metrics = advantage_metrics(AdvantageMoments.from_samples(samples))
    assert metrics["returns/mean"] == 3.0
    assert metrics["returns/std"] == pytest.approx(np.sqrt(8 / 3))
    # The errors are 0, 1 and 0 with mean 1/3, and the returns 1, 3 and 5 with mean 3.
    assert metrics["value/explained_variance"] == pytest.approx(1 - (2 / 3) / 8)
    flat = advantage_metrics(AdvantageMoments.from_samples([sample_with_values([1, 2], [3, 3], [True, True])]))
    assert flat["returns/std"] == 0 and np.isnan(flat["value/explained_variance"])
    without_critic = replace(samples[0], values=None)
    assert advantage_metrics(AdvantageMoments.from_samples([without_critic])).keys() == metrics.keys() - {
        "value/explained_variance"
    }


def test_flops_and_performance_of_a_step_equal_hand_computed_values() -> None:
    # ODD: 2 layers, D 36, F 44, 6 query and 3 key/value heads of 10.
    matrices = 2 * 2 * (36 * 60 + 2 * 36 * 30 + 60 * 36 + 3 * 36 * 44)
    pair, head = 2 * 4 * 6 * 10, 2 * 36 * ODD.vocab_size
    policy, classifier = (DecoderDefinition.create(ODD, network) for network in (Decoder, ValueDecoder))
    lengths = SequenceLengths(np.array([2, 2, 3]), np.array([1, 3, 2]), np.array([0, 0, 1]))
    # Prompts have 1+2 (twice) and 1+2+3 pairs of tokens, and the tokens after them 3, 3+4+5 and 4+5.
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
    performance = step_performance([sample(0, 1.0, [0.0, 0.0])], flops=1e9, seconds=4.0)
    # The peak of a CPU is unknown.
    assert (performance["perf/mfu"], performance["perf/tokens_per_s"]) == (None, 0.5)
    assert "perf/rollout/resumes" not in rollout_performance(RolloutCounters())
    found = rollout_performance(RolloutCounters(resumed_rows=2, rebuilt_rows=1))
    assert (found["perf/rollout/resumes"], found["perf/rollout/rebuilds"]) == (2, 1)


def test_mismatch_metrics_equal_hand_computed_values() -> None:
    def scored(behavior: list[float], policy: list[float], mask: list[bool]) -> Sample:
        columns = {"behavior_logprobs": behavior, "policy_logprobs": policy}
        return replace(
            sample(0, 1.0, [0.0] * len(mask), mask=mask), **{k: np.array(v, np.float32) for k, v in columns.items()}
        )

    samples = [
        *(scored([-1.0, -3.0, -9.0], [-1.5, -2.0, 0.0], [True, True, False]), scored([-0.5], [-1.0], [True])),
        *(scored([-5.0], [-7.0], [False]), sample(0, 1.0, [0.0])),
    ]
    d = np.array([0.5, -1.0, 0.5])
    assert mismatch_metrics(samples) == pytest.approx(
        {
            "mismatch/training_ppl": (np.exp(1.75) + np.exp(1.0)) / 2,
            **{"mismatch/rollout_ppl": (np.exp(2.0) + np.exp(0.5)) / 2, "mismatch/log_ppl_diff": (-0.25 + 0.5) / 2},
            **{"mismatch/kl": 0.0, "mismatch/k3_kl": (np.exp(-d) + d - 1).mean()},
        }
    )
    assert mismatch_metrics(samples[2:]) == {}


def test_host_memory_is_limited_by_the_container(tmp_path: Path) -> None:
    installed = host_memory_bytes(tmp_path / "absent")
    (tmp_path / "limit").write_text("1048576\n")
    assert host_memory_bytes(tmp_path / "limit") == 1 << 20
    (tmp_path / "limit").write_text("max\n")
    assert host_memory_bytes(tmp_path / "limit") == installed > 1 << 30


def test_episode_metrics_of_two_games_equal_hand_computed_values() -> None:
    calls = [{"tool_calls": 2.0, "tool_errors": 1.0, "distance": 4.0}, {"tool_calls": 1.0, "distance": 2.0}, {}]
    assert episode_metrics([make_sample([1, 2])]) == episode_metrics([]) == {}
    samples = [
        with_turns([(2, 3), (1, 1), (3, 0)], scores={"win": 1.0, "grace": 0.5}, metrics=calls, reward=1.5),
        with_turns([(2, 0)], scores={"win": 0.0}, end="turns", reward=0.5),
        replace(make_sample(np.zeros(100)), elapsed_s=100.0),
    ]
    samples[0] = replace(samples[0], elapsed_s=10.0)
    samples[1] = replace(samples[1], elapsed_s=4.0)
    assert episode_metrics(samples) == pytest.approx(
        {
            **{"episode/turns_mean": 2.0, "episode/turns_p90": 2.8},
            **{f"episode/end/{end}": 0.5 for end in ("terminated", "turns")},
            **{f"episode/end/{end}": 0.0 for end in ("truncated", "turn_tokens", "tokens", "observation", "dropped")},
            **{"episode/written_tokens_mean": 4.0, "episode/observed_tokens_mean": 2.0, "episode/tool_calls_mean": 1.5},
            **{"episode/tool_errors_mean": 0.5, "env/score/win": 0.5, "env/score/grace": 0.5, "env/distance": 3.0},
            **{"time/env_turn_p50_s": 1.5, "time/env_turn_p99_s": 2.97, "perf/rollout/acting_share": 0.5},
        }
    )


def test_an_environment_has_a_limited_number_of_metrics() -> None:
    many = {f"number_{i:03}": 1.0 for i in range(100)} | {"a/path": 1.0}
    names = [name for name in episode_metrics([with_turns([(1, 0)], metrics=[many])]) if name.startswith("env/")]
    assert names == [f"env/number_{i:03}" for i in range(MAX_NAMES)]
    dropped = replace(with_turns([(1, 0)], end="dropped"), finish_reason="dropped:environment exit")
    assert episode_metrics([dropped, with_turns([(1, 0)], reward=1.0)])["episode/end/dropped"] == 0.5
