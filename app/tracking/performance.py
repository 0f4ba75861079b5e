"""Computes the FLOPs of a training step, and its metrics of speed, memory and schedules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int64

from app.batching.micro_batch_plan import SequenceCost, SequenceLengths
from app.distributed.collectives import gather_json_over_hosts, max_over_hosts, sum_over_hosts
from app.mesh.chips import TPU_CHIPS
from app.mesh.devices import peak_memory_bytes
from app.model.architecture import forward_flops, lm_head_flops, token_flops
from app.model.decoder import Decoder, DecoderDefinition
from app.records.sample import Sample
from app.rollout.counters import RolloutCounters
from app.rollout.scheduling.schedule_metrics import ScheduleMetrics
from app.runtime.reward_model import RewardModelSpec
from app.runtime.session import Session
from settings import Settings
from settings.schema.algorithm import AlgorithmSettings, CriticSettings, ForwardRole

PEAK_FLOPS = {
    **{chip.device_kind: chip.flops for chip in TPU_CHIPS.values()},
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""Maps a prefix of `device_kind` to the peak dense bfloat16 FLOP/s of a device. Source: the vendors' data sheets."""


class NetworkPass(NamedTuple):
    """Counts the FLOPs of one network's passes over the samples of a step."""

    sequence_flops: SequenceCost
    """Maps the lengths of sequences, in tokens, to the FLOPs of the layers for each sequence."""
    head_flops: int
    """FLOPs of the LM head per completion token; 0 for networks with a value head."""
    shares_prompts: bool
    """Whether the samples of a prompt share one computation of the prompt."""

    def total(self, lengths: SequenceLengths) -> float:
        """Returns the FLOPs of the passes over samples with these lengths."""
        prompts = self.sequence_flops(lengths.prompts)
        completions = self.sequence_flops(lengths.totals) - prompts + self.head_flops * lengths.completions
        if self.shares_prompts:
            prompts = prompts[np.sort(np.unique(lengths.prompt_keys, return_index=True)[1])]
        # The sum over a step of a large model exceeds int64.
        return float(prompts.sum(dtype=np.float64) + completions.sum(dtype=np.float64))


@dataclass(frozen=True, slots=True)
class StepFlops:
    """Counts the FLOPs of all network passes of a step."""

    rollout: NetworkPass
    passes: tuple[NetworkPass, ...]
    """The passes for scoring and for updates."""
    reward_model: NetworkPass | None = None

    def total(
        self, *, sampled: SequenceLengths | None, learned: SequenceLengths, rewarded: Sequence[SequenceLengths] = ()
    ) -> float:
        """Returns the FLOPs that a step needs, without padding and recomputation.

        Source: Chowdhery et al. 2022 (PaLM), appendix B, with the visible pairs of causal attention only.

        Args:
            sampled: lengths of the samples of all rounds, over all hosts; None if none were generated.
            learned: lengths of the samples used for scoring and updates.
            rewarded: lengths of the conversations of each pass of the reward model.
        """
        flops = sum(one.total(learned) for one in self.passes)
        if sampled is not None:
            flops += self.rollout.total(sampled)
        if self.reward_model is not None:
            flops += sum(self.reward_model.total(lengths) for lengths in rewarded)
        return flops


def make_step_flops(
    settings: Settings, session: Session, reward_model: RewardModelSpec | None, *, trains_policy: bool = True
) -> StepFlops:
    """Returns the FLOPs counter of a step's passes through policy, reference, critic and reward model.

    Args:
        trains_policy: False for a step of the critic's warm-up, which does not update the policy.
    """
    policy = session.model_spec.policy_definition
    critic = session.scoring.critic and session.scoring.critic.spec.definition
    networks: Mapping[ForwardRole, DecoderDefinition | None] = {
        "policy": policy,
        "reference": session.scoring.reference_definition,
        "critic": critic,
        "reward": reward_model and reward_model.definition,
    }

    def scoring(role: ForwardRole) -> NetworkPass:
        definition = networks[role]
        assert definition is not None
        return network_pass(definition, shares_prompts=settings.score.for_role(role).max_tokens_per_device is not None)

    def updating(definition: DecoderDefinition, scope: AlgorithmSettings | CriticSettings) -> NetworkPass:
        shares_prompts = scope.max_tokens_per_device is not None
        return network_pass(definition, shares_prompts=shares_prompts, updates=settings.algorithm.epochs)

    updates = [updating(policy, settings.algorithm)] if trains_policy else []
    updates += [updating(critic, settings.critic)] if critic else []
    return StepFlops(
        rollout=network_pass(session.to_decode_weights.definition, shares_prompts=True),
        passes=(*map(scoring, settings.scored_roles), *updates),
        reward_model=scoring("reward") if reward_model else None,
    )


def network_pass(definition: DecoderDefinition, *, shares_prompts: bool, updates: int = 0) -> NetworkPass:
    """Returns the FLOPs counter of a network's passes, including adapters and LM head.

    In the backward pass, a trained matrix needs twice the FLOPs of the forward pass; a frozen matrix, which has no
    gradient, needs as many as in the forward pass.

    Args:
        shares_prompts: whether the samples of a prompt share one computation of the prompt.
        updates: number of forward and backward passes; 0 = a forward pass only.
    """
    blocks, has_adapters = forward_flops(definition.architecture), definition.lora is not None
    adapters = 2 * definition.num_trainable if has_adapters else 0
    frozen = token_flops(definition.architecture) if has_adapters else 0
    head = lm_head_flops(definition.architecture) if definition.network_class is Decoder else 0

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        forward = blocks(lengths) + adapters * lengths
        return updates * (3 * forward - frozen * lengths) if updates else forward

    of_head = updates * (2 if has_adapters else 3) * head if updates else head
    return NetworkPass(flops, of_head, shares_prompts)


def step_performance(samples: Sequence[Sample], *, flops: float, seconds: float) -> dict[str, float | int | None]:
    """Returns the speed and peak memory of a step; `perf/mfu` is None if the devices' peak FLOP/s is unknown."""
    num_tokens = int(sum_over_hosts(sum(len(s.completion_ids) for s in samples)))
    kind = jax.devices()[0].device_kind
    peak = next((most for start, most in PEAK_FLOPS.items() if kind.startswith(start)), None)
    return {
        "perf/tokens_per_s": num_tokens / seconds,
        "perf/mfu": None if peak is None else flops / (seconds * peak * jax.device_count()),
        "perf/peak_memory_bytes": peak_memory_bytes(),
    }


def rollout_performance(counters: RolloutCounters) -> dict[str, float]:
    """Returns the metrics of a step's rollouts, over all hosts."""
    counts = np.asarray(list(vars(counters).values()))
    total = RolloutCounters(*sum_over_hosts(counts).tolist())
    acted: dict[str, float] = {"perf/rollout/resumes": total.resumed_rows, "perf/rollout/rebuilds": total.rebuilt_rows}
    return (acted if any(acted.values()) else {}) | {
        "perf/rollout/segments": total.segments / jax.process_count(),
        "perf/rollout/prefill_tokens_saved": total.prompt_tokens - total.prefilled_tokens - total.recomputed_tokens,
        "perf/rollout/preemptions": total.preempted_rows,
        # With asynchronous rollouts, there may be steps in which no sample was finished.
        "perf/rollout/bubble": 1 - total.generated_tokens / total.row_steps if total.row_steps else 0.0,
    }


def schedule_performance(schedules: Sequence[ScheduleMetrics]) -> dict[str, float | None]:
    """Returns the schedule metrics of a step's rollouts, over all hosts; empty without schedules.

    The makespan sums the slowest host's makespan of each rollout, because hosts wait for each other. Bubble and tail
    are averages weighted by makespan. `probe_recall` is None if no sample was longer than the others, `tail_fraction`
    if rollouts are asynchronous, and metrics of heavy prompts if the scheduler does not classify prompts.
    """
    if not schedules:
        return {}
    of_hosts = gather_json_over_hosts([asdict(one) for one in schedules])
    hosts = [[ScheduleMetrics(**one) for one in host] for host in of_hosts]
    schedules = [one for host in hosts for one in host]
    makespan_s = sum(max(one.makespan_s for one in rollout) for rollout in zip(*hosts, strict=True))
    seconds = np.asarray([one.makespan_s for one in schedules])
    tail = float(np.average([one.tail_fraction for one in schedules], weights=seconds))

    def known(name: str) -> list[float]:
        return [value for one in schedules if (value := getattr(one, name)) is not None]

    def mean(name: str) -> float | None:
        return float(np.mean(known(name))) if known(name) else None

    totals = ("breaker_trips", "truncated", "suspensions", "stolen_by_fast", "stolen_by_heavy", "repacked_tokens")
    return {
        "perf/rollout/makespan_s": makespan_s,
        "perf/rollout/bubble": float(np.average([one.bubble for one in schedules], weights=seconds)),
        "perf/rollout/tail_fraction": None if math.isnan(tail) else tail,
        **{f"perf/rollout/{name}": mean(name) for name in ("probe_recall", "threshold", "heavy_share")},
        "perf/rollout/last_verdict_s": max(known("last_verdict_s"), default=None),
        "perf/rollout/last_verdict_tokens": max(known("last_verdict_tokens"), default=None),
        **{f"perf/rollout/{name}": sum(getattr(one, name) for one in schedules) for name in totals},
    }


def async_metrics(samples: Sequence[Sample], *, step: int, num_ready: int) -> dict[str, float]:
    """Returns the mean and maximum staleness of a step's tokens, in steps, and the minimum over hosts of `num_ready`.

    Args:
        num_ready: number of rounds of this host that were complete when the step began.
    """
    lags = np.concatenate([(step - 1 - s.token_policy_versions)[s.mask] for s in samples])
    total, count = sum_over_hosts(np.asarray([lags.sum(), len(lags)], np.int64)).tolist()
    oldest, fewest_ready = max_over_hosts(np.asarray([lags.max(initial=0), -num_ready], np.int64)).tolist()
    return {
        "perf/rollout/staleness_mean": total / count if count else 0.0,
        "perf/rollout/staleness_max": oldest,
        "perf/rollout/rounds_ready": -fewest_ready,
    }
