"""A policy that is a table of logits, with one row per completion token, to test the loss without a decoder."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from app.batching.micro_batch_plan import MicroBatchPlan
from app.batching.token_batch import pack_per_token
from app.records.sample import Sample
from app.update.loss_aggregation import AggregationFn
from app.update.policy_loss import LossStats, PolicyBatch, PolicyLoss
from tests.tiny import pack_update


def loss_and_gradient(
    loss: PolicyLoss,
    table: Float32[np.ndarray, "tokens V"],
    samples: Sequence[Sample],
    plan: MicroBatchPlan,
    *,
    weights: AggregationFn,
) -> tuple[Float32[Array, "tokens V"], LossStats]:
    """Returns the gradient with respect to the table, and loss and metrics, summed over micro-batches.

    Args:
        table: logits of every completion token of all samples, concatenated.
    """
    lengths = [len(s.completion_ids) for s in samples]
    starts = {s.uid: end - length for s, end, length in zip(samples, np.cumsum(lengths), lengths, strict=True)}

    def share(table: Array, batch: PolicyBatch, place: Array) -> tuple[Array, LossStats]:
        log_softmax = jax.nn.log_softmax(table[place])
        chosen = jnp.take_along_axis(log_softmax, batch.tokens.targets[..., None], axis=-1)[..., 0]
        return loss(chosen, -jnp.sum(jnp.exp(log_softmax) * log_softmax, axis=-1), batch)

    def places_of(sample: Sample) -> np.ndarray:
        return starts[sample.uid] + np.arange(len(sample.completion_ids))

    gradients, parts = [], []
    for batch, micro_batch in zip(pack_update(samples, plan, weights=weights), plan.micro_batches, strict=True):
        place = jnp.asarray(pack_per_token(samples, micro_batch, places_of), jnp.int32)
        (_, part), gradient = jax.value_and_grad(share, has_aux=True)(jnp.asarray(table), batch, place)
        gradients.append(gradient)
        parts.append(part)
    return sum(gradients[1:], gradients[0]), sum(parts[1:], parts[0])
