"""Importance-sampling correction for tokens sampled by a policy other than the one being trained.

With mu the policy that sampled the token (`behavior_logprobs`), pi_old the policy before the step's updates and
w = pi_old / mu, the loss is sg(c(w)) * surrogate. The surrogate's ratio stays relative to pi_old, so the clip limits
how much an update changes, not how old a sample may be. If mu is pi_old, w is 1 and the loss is uncorrected.

The logprobs of both policies cover the whole vocabulary at the sampler's temperature: truncation by top-k, top-p
or min-p is ignored in both.

A token with weight 0 still counts in the denominators of the loss, which are counts of a whole optimizer step:
masking a token makes the step smaller, but never gives other tokens a larger weight.

Sources: Hilton et al. 2022, "Batch size-invariance for policy optimization", and Fu et al. 2025 (AReaL): the decoupled
objective; Ionides 2008, "Truncated importance sampling", and Yao et al. 2025 (TIS): truncation; Ling team 2025
(IcePop): the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from app.update.log_ratio import SampleReducer

LOG_WEIGHT_LIMIT = 20.0
"""Clip bound of log weights, against overflow in a product."""

LogWeightFn = Callable[[Array, SampleReducer | None], Array]
"""(log w per token, reducer over samples) -> log of the weight applied to each token."""


def token_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Returns log w_t of each token, ignoring the probability of its context."""
    return log_weights


def sequence_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Returns the sum of log w_t over the sample: unbiased, but weights of long samples are far from 1."""
    assert reducer is not None
    return reducer.sum(log_weights)


def geometric_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Returns the mean of log w_t over the sample, as in GSPO's ratio."""
    assert reducer is not None
    return reducer.mean(log_weights)


class BoundedWeights(NamedTuple):
    weights: Float32[Array, "*tokens"]
    was_bounded: Bool[Array, "*tokens"]
    """True if the bound changed the weight."""


BoundFn = Callable[[Array], BoundedWeights]


def truncate_weights(weights: Float32[Array, "*tokens"], *, max_weight: float) -> BoundedWeights:
    """Returns min(w, max): every token keeps a gradient, which is too small where w exceeds max."""
    return BoundedWeights(jnp.minimum(weights, max_weight), weights > max_weight)


def mask_weights(weights: Float32[Array, "*tokens"], *, min_weight: float, max_weight: float) -> BoundedWeights:
    """Returns w inside [min, max], else 0: tokens on which the policies differ too much get no gradient."""
    outside = (weights < min_weight) | (weights > max_weight)
    return BoundedWeights(jnp.where(outside, 0.0, weights), outside)


class CorrectedWeights(NamedTuple):
    weights: Float32[Array, "R C"]
    """Weight of each token's surrogate."""
    unbounded_weights: Float32[Array, "R C"]
    """Weights before the bound and the veto are applied."""
    was_bounded: Bool[Array, "R C"]
    vetoed: Bool[Array, "R C"]
    """True on all tokens of a sample with a token whose w is below the veto threshold."""


@dataclass(frozen=True)
class ImportanceCorrection:
    """Converts the tokens' log weights into bounded weights.

    Args:
        log_weight: level of the weight: per token or per sample.
        bound: treatment of weights far from 1.
        veto: if w of any token is below this threshold, its whole sample gets weight 0; 0 = no veto.
    """

    log_weight: LogWeightFn
    bound: BoundFn
    veto: float = 0.0

    def __call__(self, log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> CorrectedWeights:
        """Computes the weights, without a gradient. `log_weights` are log pi_old - log mu, 0 outside the mask.

        `reducer` may be None if each token has its own weight and there is no veto.
        """
        log_weights = jax.lax.stop_gradient(log_weights)
        level = jnp.clip(self.log_weight(log_weights, reducer), -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
        unbounded = jnp.exp(level)
        weights, was_bounded = self.bound(unbounded)
        vetoed = jnp.zeros_like(was_bounded)
        if self.veto:
            assert reducer is not None
            vetoed = reducer.sum((log_weights < math.log(self.veto)).astype(jnp.float32)) > 0
        return CorrectedWeights(jnp.where(vetoed, 0.0, weights), unbounded, was_bounded, vetoed)
