"""Held-out accuracy, always on the same prompts: before training, during it, after it, and of any model by itself."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from app.distributed.collectives import max_over_hosts
from app.distributed.lockstep import host_shard, max_shard_size
from app.distributed.preemption import cancellation_barrier
from app.distributed.tables import gather_table
from app.evaluation.metrics import estimate_metrics, prompt_columns
from app.model.kv_cache import DecodeWeights
from app.records.sample import Prompt, Sample
from app.report.confidence_intervals import MetricEstimate
from app.reward.aggregate import RewardedSamples
from app.reward.plugin import StepInfo
from app.reward.reward_functions import RewardFunctions, accuracy_function_name
from app.runtime.session import Session
from settings import Settings


def evaluation_batch_size(settings: Settings, num_prompts: int) -> int:
    """How many of a host's prompts are generated from at once: no more rows than in a rollout, or one prompt's."""
    rows = settings.rollout.prompts_per_step * settings.rollout.group_size
    return min(num_prompts, max(rows // settings.eval.num_samples, 1))


def evaluate(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], rewards: RewardFunctions, moment: StepInfo
) -> RewardedSamples:
    """`eval.num_samples` samples at `eval.temperature` of each prompt of this host's run of them, judged.

    Raises:
        StoppedError: generation was stopped, on this host or another.
    """
    own = host_shard(len(prompts))
    return rewards.grade_held_out([*generate_samples(session, weights, prompts, prompt_indices=own)], moment)


def generate_samples(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], *, prompt_indices: Collection[int]
) -> Iterator[Sample]:
    """Samples of those prompts of this host's run that are asked for, by their places, in order.

    A sample's group is its prompt's place. All hosts ask at once, each for as few as it likes.

    Raises:
        StoppedError: generation was stopped, on this host or another.
    """
    generate = _generate_in_batches if session.evaluates_in_batches else _generate_from_queue
    own = [place for place in host_shard(len(prompts)) if place in prompt_indices]
    return generate(session, weights, prompts, own)


def _generate_in_batches(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], prompt_indices: Sequence[int]
) -> Iterator[Sample]:
    """Always the same batches, without those where nobody is asked for.

    So a sample has the neighbours that it would have if all were asked for, and the same bits.
    """
    run, longest = host_shard(len(prompts)), max_shard_size(len(prompts))
    batch, wanted = evaluation_batch_size(session.settings, longest), set(prompt_indices)
    # Filled up with other prompts, which do not count, so that all batches of all hosts have one shape.
    batches = [range(first, first + batch) for first in range(run.start, run.start + longest, batch)]
    needed = [places for places in batches if not wanted.isdisjoint(places)]
    turns = int(max_over_hosts(np.asarray(len(needed))))
    for places in [*needed, *batches][:turns]:
        with cancellation_barrier():
            samples = session.generate(
                weights,
                [prompts[place % len(prompts)] for place in places],
                session.evaluation_request(first_group_id=places.start),
            )
        # A place beyond this host's run is no place of its own, whatever prompt filled it up.
        yield from (sample for sample in samples if sample.group_id in wanted)
        wanted -= {*places}


def _generate_from_queue(
    session: Session, weights: DecodeWeights, prompts: Sequence[Prompt], prompt_indices: Sequence[int]
) -> Iterator[Sample]:
    """Filled up with other prompts, which do not count, to as many as the host has that is asked for most."""
    turns = int(max_over_hosts(np.asarray(len(prompt_indices))))
    if not turns:
        return
    first, wanted = host_shard(len(prompts)).start, set(prompt_indices)
    others = [place for place in ((first + i) % len(prompts) for i in range(len(prompts))) if place not in wanted]
    places = [*prompt_indices, *others][:turns]
    num_samples = session.settings.eval.num_samples
    with cancellation_barrier():
        samples = session.stream(weights, [prompts[i] for i in places], session.evaluation_request())
        for number, sample in enumerate(samples):
            place = places[number // num_samples]
            if place in wanted:
                yield replace(sample, group_id=place)


def evaluation_estimates(samples: Sequence[Sample], settings: Settings) -> dict[str, MetricEstimate]:
    """What the samples of all hosts say. All hosts ask at once; see `figures_of`."""
    num_samples = settings.eval.num_samples
    columns = prompt_columns(samples, judge=accuracy_function_name(settings.reward), num_samples=num_samples)
    return estimate_metrics(gather_table(columns), num_samples=num_samples)


def evaluation_metrics(samples: Sequence[Sample], settings: Settings) -> dict[str, float | None]:
    """The same as numbers of `metrics.jsonl`."""
    return {name: figure.value for name, figure in evaluation_estimates(samples, settings).items()}
