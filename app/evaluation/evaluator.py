"""Evaluation on held-out prompts, the same ones in every evaluation: during training and by `grpo evaluate`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from app.distributed.collective_files import host_slice
from app.distributed.collectives import gather_table, max_over_hosts
from app.distributed.preemption import cancellation_barrier
from app.evaluation.prompt_metrics import estimate_metrics, prompt_columns
from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt, Sample
from app.report.confidence_intervals import MetricEstimate
from app.reward.aggregate import RewardedSamples
from app.reward.plugin import StepInfo
from app.reward.reward_functions import RewardFunctions, accuracy_function_name
from app.runtime.session import Session
from settings import Settings


def evaluate(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], rewards: RewardFunctions, moment: StepInfo
) -> RewardedSamples:
    """Generates and judges `eval.num_samples` samples at `eval.temperature` for each prompt of this host's shard.

    Raises:
        StoppedError: generation was stopped, on this host or another.
    """
    samples = generate_samples(session, weights, prompts, prompt_indices=host_slice(len(prompts)))
    return rewards.grade_held_out([*samples], moment)


def generate_samples(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], *, prompt_indices: Collection[int]
) -> Iterator[Sample]:
    """Yields the samples of the requested prompts of this host's shard, in order.

    A sample's `group_id` is the index of its prompt. All hosts must call this together, but may request different
    numbers of prompts.

    Hosts that request fewer prompts than others fill up with prompts whose samples they drop.

    Raises:
        StoppedError: generation was stopped, on this host or another.
    """
    requested = [i for i in host_slice(len(prompts)) if i in prompt_indices]
    num_queued = int(max_over_hosts(np.asarray(len(requested))))
    if not num_queued:
        return
    start, wanted = host_slice(len(prompts)).start, set(requested)
    others = [i for i in ((start + i) % len(prompts) for i in range(len(prompts))) if i not in wanted]
    indices = [*requested, *others][:num_queued]
    num_samples = session.settings.eval.num_samples
    with cancellation_barrier():
        request = session.evaluation_request()
        samples = session.evaluation_generator.stream(weights, [prompts[i] for i in indices], request)
        for number, sample in enumerate(samples):
            index = indices[number // num_samples]
            if index in wanted:
                yield replace(sample, group_id=index)


def evaluation_estimates(samples: Sequence[Sample], settings: Settings) -> dict[str, MetricEstimate]:
    """Returns the metrics over the samples of all hosts, which must call this together; see `estimate_metrics`."""
    num_samples = settings.eval.num_samples
    columns = prompt_columns(samples, judge=accuracy_function_name(settings.reward), num_samples=num_samples)
    return estimate_metrics(gather_table(columns), num_samples=num_samples)


def evaluation_metrics(samples: Sequence[Sample], settings: Settings) -> dict[str, float | None]:
    """Returns the values of `evaluation_estimates`, as written to `metrics.jsonl`."""
    return {name: estimate.value for name, estimate in evaluation_estimates(samples, settings).items()}
