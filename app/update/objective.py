"""The loss of one micro-batch: clipped surrogate plus a KL penalty, weighted token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.pack import HostOrDevice, TokenBatch
from app.batching.row_logprobs import row_logprobs
from app.policy.decoder import DecoderDefinition, Params
from app.update.kl import Estimator
from app.update.surrogate import clipped_surrogate


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class UpdateBatch:
    """Micro-batches of one optimizer step. Per-token fields stand beside the targets of `tokens`."""

    tokens: TokenBatch
    behavior_logprobs: Float32[HostOrDevice, "M R C"]
    advantages: Float32[HostOrDevice, "M R C"]
    loss_weights: Float32[HostOrDevice, "M R C"]
    """What each token's loss counts in the sum; see `app.update.aggregation`."""
    token_weights: Float32[HostOrDevice, "M R C"]
    """1 / (tokens of the step) on tokens the policy wrote: sums of it are means for the metrics."""
    policy_logprobs: Float32[HostOrDevice, "M R C"] | None
    """None when the step has one update: its own logprobs are then the proximal ones."""
    reference_logprobs: Float32[HostOrDevice, "M R C"] | None
    """None when there is no KL penalty."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossParts:
    """What micro-batches add up to: `sums` add, `maxima` take the larger."""

    sums: dict[str, Float32[Array, ""]]
    maxima: dict[str, Float32[Array, ""]]

    def __add__(self, other: LossParts) -> LossParts:
        return LossParts(
            jax.tree.map(jnp.add, self.sums, other.sums), jax.tree.map(jnp.maximum, self.maxima, other.maxima)
        )


Proximal = Callable[[Array, UpdateBatch], Array]
Objective = Callable[[Params, UpdateBatch, Array], tuple[Array, LossParts]]


def own_logprobs(current_logprobs: Array, batch: UpdateBatch) -> Array:
    """One update per rollout: the weights have not moved yet, so the ratio is exactly 1."""
    return jax.lax.stop_gradient(current_logprobs)


def scored_logprobs(current_logprobs: Array, batch: UpdateBatch) -> Array:
    """Several updates per rollout: the logprobs scored before the first of them."""
    assert batch.policy_logprobs is not None
    return batch.policy_logprobs


def make_objective(
    definition: DecoderDefinition,
    *,
    proximal: Proximal,
    kl_estimator: Estimator,
    beta: float,
    clip_low: float,
    clip_high: float,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
) -> Objective:
    """(params, one micro-batch, temperature) -> (its share of the loss, its share of the metrics)."""

    def objective(params: Params, batch: UpdateBatch, temperature: Array) -> tuple[Array, LossParts]:
        tokens = batch.tokens
        logprobs, entropy = row_logprobs(
            definition.bind(params),
            tokens,
            temperature=temperature,
            dtype=dtype,
            remat=remat,
            logits_chunk=logits_chunk,
        )
        # Padding holds rubbish; equal logprobs there keep ratios at 1 and differences at 0.
        current = jnp.where(tokens.mask, logprobs, batch.behavior_logprobs)
        proximal_logprobs = jnp.where(tokens.mask, proximal(current, batch), batch.behavior_logprobs)
        surrogate = clipped_surrogate(
            current, proximal_logprobs, batch.advantages, clip_low=clip_low, clip_high=clip_high
        )
        loss = jnp.sum(batch.loss_weights * surrogate.loss)

        def mean(x: Array) -> Array:
            return jnp.sum(batch.token_weights * x)

        difference = jnp.abs(current - batch.behavior_logprobs)
        sums = {
            "policy/entropy": mean(entropy),
            "policy/clip_fraction_low": mean(surrogate.clipped_low),
            "policy/clip_fraction_high": mean(surrogate.clipped_high),
            "rollout/sampler_scorer_logprob_diff_mean": mean(difference),
        }
        if batch.reference_logprobs is not None:
            penalty = kl_estimator(current, jnp.where(tokens.mask, batch.reference_logprobs, current))
            loss = loss + beta * jnp.sum(batch.loss_weights * penalty)
            sums["policy/kl"] = mean(penalty)
        maxima = {
            "policy/ratio_max": jnp.max(jnp.where(tokens.mask, surrogate.ratio, 0.0)),
            "rollout/sampler_scorer_logprob_diff_max": jnp.max(difference),
        }
        return loss, jax.lax.stop_gradient(LossParts({"loss": loss, **sums}, maxima))

    return objective
