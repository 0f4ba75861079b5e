"""Evaluates on the same held-out prompts every time, during training and in `grpo evaluate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from app.distributed.collective_files import host_slice
from app.distributed.collectives import gather_table
from app.distributed.preemption import cancellation_barrier
from app.evaluation.prompt_metrics import estimate_metrics, prompt_columns
from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt, Sample
from app.report.confidence_intervals import MetricEstimate
from app.reward.reward_functions import accuracy_function_name
from app.runtime.session import Session
from settings import Settings


def generate_samples(session: Session, weights: DecodeWeights, prompts: Sequence[Prompt]) -> Iterator[Sample]:
    """Yields the samples of this host's shard of the prompts, in order; their `group_id` is the index of the prompt.

    All hosts must call it together. A host with one prompt fewer than others generates, and drops, extra samples.

    Raises:
        StoppedError: generation was stopped, on this host or another.
    """
    shard, longest = host_slice(len(prompts)), len(host_slice(len(prompts), host=0))
    queued = [prompts[i % len(prompts)] for i in range(shard.start, shard.start + longest)]
    with cancellation_barrier():
        samples = session.evaluation_generator.stream(weights, queued, session.evaluation_request())
        for number, sample in enumerate(samples):
            index = shard.start + number // session.settings.eval.num_samples
            if index in shard:
                yield replace(sample, group_id=index)


def evaluation_estimates(samples: Sequence[Sample], settings: Settings) -> dict[str, MetricEstimate]:
    """Returns the metrics over the samples of all hosts; see `estimate_metrics`. All hosts must call it together."""
    num_samples = settings.eval.num_samples
    columns = prompt_columns(samples, judge=accuracy_function_name(settings.reward), num_samples=num_samples)
    return estimate_metrics(gather_table(columns), num_samples=num_samples)


def evaluation_metrics(samples: Sequence[Sample], settings: Settings) -> dict[str, float | None]:
    """Returns the values of `evaluation_estimates`, as written to `metrics.jsonl`."""
    return {name: estimate.value for name, estimate in evaluation_estimates(samples, settings).items()}
