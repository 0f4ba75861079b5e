"""Optimizer steps over mini-batches, which are split into micro-batches, packed and placed on devices."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from app.batching.micro_batch_plan import MicroBatch
from app.batching.micro_batcher import GlobalPlan, MicroBatcher
from app.batching.packing_metrics import policy_batching_metrics
from app.batching.sample_exchange import HostRows, fetch_rows
from app.batching.token_batch import pack_last_target_indices, pack_per_token, pack_tokens
from app.distributed.collectives import sum_over_hosts
from app.mesh.placement import to_global
from app.model.architecture import RouteShape
from app.model.decoder import Params
from app.records.sample import Sample
from app.update.loss_aggregation import AggregationFn, StepTotals, sequence_mean_token_mean, token_mean
from app.update.mini_batches import EpochMiniBatches
from app.update.optimizer import TrainState
from app.update.policy_loss import PolicyBatch
from app.update.ratios import SampleReducer
from app.update.step import BROKEN_GRADIENTS
from app.update.value_loss import ValueBatchPacker
from settings.schema.algorithm import ScoredRole

log = logging.getLogger(__name__)

UpdateStepFn = Callable[[TrainState, Sequence[Any], Array, Params | None], tuple[TrainState, dict[str, Array]]]
"""(state, micro-batches, temperature, frozen) -> (new state, metrics); see `app.update.step.UpdateStep`."""


@dataclass(frozen=True)
class PolicyBatchPacker:
    """Packs the samples of one micro-batch into the inputs of the policy's loss.

    Args:
        aggregation: weight of each token's loss; see `app.update.loss_aggregation`.
        roles: roles whose scored logprobs the loss reads.
        needs_sample_reducer: whether the loss reads `PolicyBatch.sample_reducer`.
        measures_mismatch: whether the loss computes the `mismatch/` metrics, because scoring does not.
        route_shape: shape of each token's routes to replay; None = no replay.
    """

    aggregation: AggregationFn
    roles: Collection[ScoredRole]
    needs_sample_reducer: bool = False
    measures_mismatch: bool = False
    route_shape: RouteShape | None = None

    @property
    def fields(self) -> list[str]:
        return ["mask", "behavior_logprobs", "advantages", *(f"{role}_logprobs" for role in self.roles)]

    def __call__(self, samples: Sequence[Sample], micro_batch: MicroBatch, totals: StepTotals) -> PolicyBatch:
        def packed(value_of: Callable[[Sample], Any]) -> np.ndarray:
            return pack_per_token(samples, micro_batch, value_of)

        def scored_logprobs(role: ScoredRole) -> np.ndarray | None:
            return packed(lambda s: getattr(s, f"{role}_logprobs")) if role in self.roles else None

        return PolicyBatch(
            tokens=pack_tokens(samples, micro_batch, self.route_shape),
            behavior_logprobs=packed(lambda s: s.behavior_logprobs),
            advantages=packed(lambda s: s.advantages),
            loss_weights=packed(lambda s: self.aggregation(s, totals)),
            token_weights=packed(lambda s: token_mean(s, totals)),
            policy_logprobs=scored_logprobs("policy"),
            reference_logprobs=scored_logprobs("reference"),
            sample_reducer=(
                make_sample_reducer(samples, micro_batch)
                if self.needs_sample_reducer or self.measures_mismatch
                else None
            ),
            sample_weights=packed(lambda s: sequence_mean_token_mean(s, totals)) if self.measures_mismatch else None,
        )


def make_sample_reducer(samples: Sequence[Sample], micro_batch: MicroBatch) -> SampleReducer:
    alone = StepTotals(num_tokens=0, num_samples=1)
    return SampleReducer(
        weights=pack_per_token(samples, micro_batch, lambda s: sequence_mean_token_mean(s, alone)),
        last_target_indices=pack_last_target_indices(samples, micro_batch),
    )


BatchPacker = PolicyBatchPacker | ValueBatchPacker
BatchingMetricsFn = Callable[[Sequence[GlobalPlan]], Mapping[str, float]]


@dataclass
class Updater:
    """Runs the compiled update step of one network on samples with advantages."""

    step: UpdateStepFn
    mesh: Mesh
    _: KW_ONLY
    micro_batcher: MicroBatcher
    """Splits the samples of an optimizer step into micro-batches."""
    pack: BatchPacker
    """Packs one micro-batch into the inputs of the loss."""
    batching_metrics: BatchingMetricsFn = policy_batching_metrics
    """Computes metrics from the micro-batch plans of a step's first epoch."""

    def update(
        self, state: TrainState, epochs: EpochMiniBatches, *, temperature: float, frozen: Params | None = None
    ) -> tuple[TrainState, dict[str, float]]:
        """Trains on all mini-batches of all epochs, and returns the final state and the step's metrics.

        Most metrics are means over the updates. Maxima are taken over all updates, the learning rate and counters come
        from the last update, and comparisons with the sampler from the first.

        Args:
            frozen: the network's frozen weights; None if all are trained.
        """
        mini_batches = {id(samples): samples for samples in itertools.chain(*epochs)}
        plans = {key: self.micro_batcher(samples, self.mesh) for key, samples in mini_batches.items()}
        reads = self.pack.fields, self.pack.route_shape
        rows = {key: fetch_rows(samples, plans[key], *reads) for key, samples in mini_batches.items()}
        history = []
        for samples in itertools.chain(*epochs):
            micro_batches = self.place(samples, rows[id(samples)])
            with jax.set_mesh(self.mesh):
                state, metrics = self.step(state, micro_batches, jnp.float32(temperature), frozen)
            history.append(metrics)
        history = jax.device_get(history)
        names = parameter_names(state.params)
        for one in history:
            _warn_of_skipped_update(one, dict(zip(names, one.pop(BROKEN_GRADIENTS, ()), strict=False)))
        metrics = summarize_updates([{k: float(v) for k, v in m.items()} for m in history])
        return state, {**metrics, **self.batching_metrics([plans[id(samples)] for samples in epochs[0]])}

    def place(self, samples: Sequence[Sample], rows: HostRows) -> list[Any]:
        """Returns the micro-batches of an optimizer step on the devices. All hosts must call it together.

        Args:
            samples: this host's samples of the step.
            rows: the samples in this host's packed rows, and this host's part of the plan.
        """
        totals = StepTotals(*sum_over_hosts(StepTotals.from_samples(samples)).tolist())
        packed = (self.pack(rows.samples, one, totals) for one in rows.plan.micro_batches)
        return [to_global(self.mesh, one) for one in packed]


def parameter_names(params: Params) -> list[str]:
    """Returns the dotted name of each parameter, in the order of `jax.tree.leaves`."""
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)]


def _warn_of_skipped_update(metrics: Mapping[str, Any], is_broken: Mapping[str, bool]) -> None:
    """Logs a warning if an update was skipped, with the parameters whose gradients contain NaN or infinity."""
    skipped = [name for name, count in metrics.items() if name.endswith("/nonfinite_in_a_row") and count]
    if skipped and jax.process_index() == 0:
        network, broken = skipped[0].partition("/")[0], [name for name, one in is_broken.items() if one]
        shown = ", ".join(broken) if len(broken) < len(is_broken) else "all parameters"
        where = f"the gradient of {shown}" if broken else "the loss"
        log.warning("an update of the %s was skipped: NaN or infinity in %s", network, where)


FIRST_UPDATE_ONLY = "rollout/"
"""Prefix of metrics that compare the policy with the sampler, valid only before the weights change."""
LAST_UPDATE_ONLY = ("/learning_rate", "/nonfinite_updates", "/nonfinite_in_a_row")
"""Suffixes of metrics reported from the last update: the learning rate and counters."""


def summarize_updates(history: Sequence[dict[str, float]]) -> dict[str, float]:
    """Reduces each metric over the updates of a training step to one value, as `Updater.update` describes."""

    def over_updates(name: str) -> float:
        values = [metrics[name] for metrics in history]
        if name.startswith(FIRST_UPDATE_ONLY):
            return values[0]
        if name.endswith(LAST_UPDATE_ONLY):
            return values[-1]
        return max(values) if name.endswith("_max") else float(np.mean(values))

    return {name: over_updates(name) for name in history[0]}
