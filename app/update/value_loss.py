"""The critic's loss of one micro-batch: half the squared error of its values, clipped around those that were scored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from app.batching.micro_batch_plan import MicroBatch
from app.batching.pack import HostOrDevice, TokenBatch, pack_per_token, pack_tokens
from app.batching.row_values import row_values
from app.model.decoder import DecoderDefinition, Params
from app.records.sample import Sample
from app.update.loss_aggregation import StepTotals, token_mean
from app.update.policy_loss import LossStats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ValueBatch:
    """One micro-batch of an optimizer step of the critic. Per-token fields stand beside the targets of `tokens`."""

    tokens: TokenBatch
    old_values: Float32[HostOrDevice, "R C"]
    """As scored, before the first of the step's updates."""
    returns: Float32[HostOrDevice, "R C"]
    token_weights: Float32[HostOrDevice, "R C"]
    """1 / (tokens of the step) on tokens the policy wrote."""


def pack_value_batch(samples: Sequence[Sample], micro_batch: MicroBatch, totals: StepTotals) -> ValueBatch:
    """What the critic learns from these samples, which have values and returns."""

    def packed(value_of: Callable[[Sample], Any]) -> np.ndarray:
        return pack_per_token(samples, micro_batch, value_of)

    return ValueBatch(
        tokens=pack_tokens(samples, micro_batch),
        old_values=packed(lambda s: s.token_values),
        returns=packed(lambda s: s.returns),
        token_weights=packed(lambda s: token_mean(s, totals)),
    )


class SquaredError(NamedTuple):
    error: Float32[Array, "*tokens"]
    clipped: Bool[Array, "*tokens"]
    """The gradient was cut because the value had already moved far enough."""


SquaredErrorFn = Callable[[Array, Array, Array], SquaredError]
"""(values, old values, returns) -> squared error of each token."""


def squared_error(
    values: Float32[Array, "*tokens"], old_values: Float32[Array, "*tokens"], returns: Float32[Array, "*tokens"]
) -> SquaredError:
    """(V - R)^2."""
    del old_values
    error = (values - returns) ** 2
    return SquaredError(error, jnp.zeros_like(error, bool))


def clipped_squared_error(
    values: Float32[Array, "*tokens"],
    old_values: Float32[Array, "*tokens"],
    returns: Float32[Array, "*tokens"],
    *,
    clip_range: float,
) -> SquaredError:
    """max((V - R)^2, (clip(V, V_old - c, V_old + c) - R)^2). Source: OpenAI Baselines, ppo2; TRL and verl have it."""
    error = (values - returns) ** 2
    near = jnp.clip(values, old_values - clip_range, old_values + clip_range)
    error_near = (near - returns) ** 2
    return SquaredError(jnp.maximum(error, error_near), error_near > error)


@dataclass(frozen=True)
class ValueLoss:
    """sum(w * error) / 2, w the `token_weights`."""

    error_fn: SquaredErrorFn

    def __call__(self, values: Float32[Array, "R C"], batch: ValueBatch) -> tuple[Array, LossStats]:
        """(its share of the loss, its share of the metrics). Values may hold finite rubbish outside the mask."""
        values = jnp.where(batch.tokens.loss_mask, values, batch.old_values)
        squared = self.error_fn(values, batch.old_values, batch.returns)
        loss = 0.5 * jnp.sum(batch.token_weights * squared.error)
        sums = {"value/loss": loss, "value/clip_fraction": jnp.sum(batch.token_weights * squared.clipped)}
        return loss, jax.lax.stop_gradient(LossStats(sums, {}))


def make_value_objective(
    definition: DecoderDefinition, value_loss: ValueLoss, *, dtype: jnp.dtype, remat: str
) -> Callable[[Params, ValueBatch, Array], tuple[Array, LossStats]]:
    """(params, one micro-batch, temperature) -> as `ValueLoss`. The temperature is the sampler's: no value has one."""

    def objective(params: Params, batch: ValueBatch, temperature: Array) -> tuple[Array, LossStats]:
        del temperature
        values = row_values(definition.bind(params), batch.tokens, dtype=dtype, remat=remat)
        return value_loss(values, batch)

    return objective
