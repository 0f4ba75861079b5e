"""Mini-batches -> optimizer steps: cutting, packing, placement."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from app.batching.metrics import update_metrics
from app.batching.micro_batch_plan import MicroBatch
from app.batching.micro_batcher import Cut, Cutter
from app.batching.pack import pack_last_targets, pack_per_token, pack_tokens
from app.distributed.collectives import sum_over_hosts
from app.mesh.placement import to_global
from app.model.decoder import Params
from app.records.sample import Sample
from app.update.loss_aggregation import Totals, Weights, sequence_mean_token_mean, token_mean
from app.update.mini_batches import Epochs
from app.update.optimizer import TrainState
from app.update.policy_loss import UpdateBatch
from app.update.ratio import SampleMeans
from settings.schema.settings import ScoredRole

Step = Callable[[TrainState, Sequence[Any], Array, Params | None], tuple[TrainState, dict[str, Array]]]
"""(state, micro-batches, temperature, frozen) -> (new state, metrics); see `app.update.step.UpdateStep`."""

Pack = Callable[[Sequence[Sample], MicroBatch, Totals], Any]
"""(samples of a mini-batch, which of them in which rows, counts of the optimizer step) -> what its loss reads."""

CutMetrics = Callable[[Sequence[Cut]], Mapping[str, float]]

FIRST_UPDATE_ONLY = "rollout/"
"""Metrics under this prefix compare with the sampler: they mean something only before weights move."""


class Updater:
    """Feeds credited samples to the compiled update step of one network.

    Args:
        cut: cuts the samples of an optimizer step into micro-batches.
        cut_metrics: what one pass over a step's samples tells of how they were cut.
    """

    def __init__(self, step: Step, mesh: Mesh, *, cut: Cutter, pack: Pack, cut_metrics: CutMetrics = update_metrics):
        self.step = step
        self.mesh = mesh
        self.cut = cut
        self.pack = pack
        self.cut_metrics = cut_metrics

    def update(
        self, state: TrainState, epochs: Epochs, *, temperature: float, frozen: Params | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """The state after every mini-batch of every epoch, and the step's metrics.

        Metrics are means over the updates, except maxima, the last learning rate, and those that
        compare with the sampler, which are the first update's.

        Args:
            frozen: the network's weights beside those that learn.
        """
        mini_batches = {id(samples): samples for epoch in epochs for samples in epoch}
        cuts = {key: self.cut(samples, self.mesh) for key, samples in mini_batches.items()}
        history = []
        for samples in (samples for epoch in epochs for samples in epoch):
            micro_batches = self._place(samples, cuts[id(samples)])
            with jax.set_mesh(self.mesh):
                state, metrics = self.step(state, micro_batches, jnp.float32(temperature), frozen)
            history.append(metrics)
        metrics = summarise([{k: float(v) for k, v in m.items()} for m in jax.device_get(history)])
        return state, {**metrics, **self.cut_metrics([cuts[id(samples)] for samples in epochs[0]])}

    def _place(self, samples: Sequence[Sample], cut: Cut) -> list[Any]:
        totals = Totals(*sum_over_hosts(np.asarray(Totals.of(samples))).tolist())
        return [to_global(self.mesh, self.pack(samples, one, totals)) for one in cut.own.micro_batches]


@dataclass(frozen=True)
class PolicyPack:
    """Lays out what the policy's loss reads.

    Args:
        aggregation: what each token's loss counts; see `app.update.loss_aggregation`.
        roles: whose scored logprobs the loss reads.
        reads_sample_means: whether it reads `UpdateBatch.sample_means`.
    """

    aggregation: Weights
    roles: Collection[ScoredRole]
    reads_sample_means: bool = False

    def __call__(self, samples: Sequence[Sample], micro_batch: MicroBatch, totals: Totals) -> UpdateBatch:
        def packed(value_of: Callable[[Sample], Any]) -> np.ndarray:
            return pack_per_token(samples, micro_batch, value_of)

        def where_needed(role: ScoredRole) -> np.ndarray | None:
            return packed(lambda s: getattr(s, f"{role}_logprobs")) if role in self.roles else None

        return UpdateBatch(
            tokens=pack_tokens(samples, micro_batch),
            behavior_logprobs=packed(lambda s: s.behavior_logprobs),
            advantages=packed(lambda s: s.advantages),
            loss_weights=packed(lambda s: self.aggregation(s, totals)),
            token_weights=packed(lambda s: token_mean(s, totals)),
            policy_logprobs=where_needed("policy"),
            reference_logprobs=where_needed("reference"),
            sample_means=pack_sample_means(samples, micro_batch) if self.reads_sample_means else None,
        )


def pack_sample_means(samples: Sequence[Sample], micro_batch: MicroBatch) -> SampleMeans:
    alone = Totals(num_tokens=0, num_samples=1)
    return SampleMeans(
        weights=pack_per_token(samples, micro_batch, lambda s: sequence_mean_token_mean(s, alone)),
        last_targets=pack_last_targets(samples, micro_batch),
    )


LAST_UPDATE_ONLY = ("/learning_rate", "/nonfinite_updates", "/nonfinite_in_a_row")
"""Ends of metrics that count on from update to update."""


def summarise(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """One value per metric over the updates of a training step."""

    def over_updates(name: str) -> float:
        values = [metrics[name] for metrics in history]
        if name.startswith(FIRST_UPDATE_ONLY):
            return values[0]
        if name.endswith(LAST_UPDATE_ONLY):
            return values[-1]
        return max(values) if name.endswith("_max") else float(np.mean(values))

    return {name: over_updates(name) for name in history[0]}
