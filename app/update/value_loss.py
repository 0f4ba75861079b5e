"""The critic's loss of one micro-batch: half the squared error of its values, optionally clipped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from app.batching.forward_passes import critic_values
from app.batching.micro_batch_plan import MicroBatch
from app.batching.token_batch import TokenBatch, pack_per_token, pack_tokens
from app.model.decoder import DecoderDefinition, Params
from app.model.segment_layout import HostOrDevice
from app.records.sample import Sample
from app.update.loss_aggregation import StepTotals, token_mean
from app.update.policy_loss import LossStats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueBatch:
    """One micro-batch of the critic's optimizer step. Per-token fields align with the targets of `tokens`."""

    tokens: TokenBatch
    old_values: Float32[HostOrDevice, "R C"]
    """Values scored before the first update of the step."""
    returns: Float32[HostOrDevice, "R C"]
    token_weights: Float32[HostOrDevice, "R C"]
    """1 / (tokens of the step) on tokens that the policy wrote, 0 elsewhere."""


class ValueBatchPacker:
    """Packs the inputs of the critic's loss from samples with values and returns."""

    fields = ("mask", "token_values", "returns")
    route_shape = None

    def __call__(self, samples: Sequence[Sample], micro_batch: MicroBatch, totals: StepTotals) -> ValueBatch:
        def packed(value_of: Callable[[Sample], Any]) -> np.ndarray:
            return pack_per_token(samples, micro_batch, value_of)

        return ValueBatch(
            tokens=pack_tokens(samples, micro_batch),
            old_values=packed(lambda s: s.token_values),
            returns=packed(lambda s: s.returns),
            token_weights=packed(lambda s: token_mean(s, totals)),
        )


SquaredErrors = tuple[Float32[Array, "*tokens"], Bool[Array, "*tokens"]]
"""Squared errors per token, and a mask of tokens whose gradient the clip removed: their value had moved far enough."""

SquaredErrorFn = Callable[[Array, Array, Array], SquaredErrors]
"""(values, old values, returns) -> squared errors per token, and the mask of clipped tokens."""


def squared_error(
    values: Float32[Array, "*tokens"], old_values: Float32[Array, "*tokens"], returns: Float32[Array, "*tokens"]
) -> SquaredErrors:
    """Returns (V - R)^2, and a mask that is False everywhere, since nothing is clipped."""
    del old_values
    error = (values - returns) ** 2
    return error, jnp.zeros_like(error, bool)


def clipped_squared_error(
    values: Float32[Array, "*tokens"],
    old_values: Float32[Array, "*tokens"],
    returns: Float32[Array, "*tokens"],
    *,
    clip_range: float,
) -> SquaredErrors:
    """Computes max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2). Source: OpenAI Baselines, ppo2, as in TRL."""
    error = (values - returns) ** 2
    near = jnp.clip(values, old_values - clip_range, old_values + clip_range)
    error_near = (near - returns) ** 2
    return jnp.maximum(error, error_near), error_near > error


def make_value_objective(
    definition: DecoderDefinition, error_fn: SquaredErrorFn, *, dtype: jnp.dtype, remat: str
) -> Callable[[Params, ValueBatch, Array], tuple[Array, LossStats]]:
    """Returns a function (params, micro-batch, temperature) -> (its share of the loss, its share of the metrics).

    The loss is sum(w * error) / 2, where w are the `token_weights`. The temperature is ignored.
    """

    def objective(params: Params, batch: ValueBatch, temperature: Array) -> tuple[Array, LossStats]:
        del temperature
        values = critic_values(definition.bind(params), batch.tokens, dtype=dtype, remat=remat)
        # Values are undefined outside the mask.
        values = jnp.where(batch.tokens.loss_mask, values, batch.old_values)
        errors, clipped = error_fn(values, batch.old_values, batch.returns)
        loss = 0.5 * jnp.sum(batch.token_weights * errors)
        sums = {"value/loss": loss, "value/clip_fraction": jnp.sum(batch.token_weights * clipped)}
        return loss, jax.lax.stop_gradient(LossStats(sums, {}))

    return objective
