"""What a token weighs in the loss that was drawn by another policy than the one that learns from it.

With mu the policy that drew the token (`behavior_logprobs`), pi_old the one before the step's updates and
w = pi_old / mu, its loss is sg(c(w)) * surrogate, and the surrogate's own ratio stays one to pi_old: so the clip
bounds what an update changes, not how old a sample is. Where mu is pi_old, w is 1 and the loss the uncorrected one.

Both policies' logprobs are over the whole vocabulary at the sampler's temperature: what top-k, top-p or min-p cut is
ignored on both sides.

A token that weighs 0 still counts in the denominators of the loss, which are counts of a whole optimizer step, fixed
before anything is cut: leaving it out makes the step smaller, never the other tokens heavier.

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

from app.update.ratio import SampleReducer

LOG_WEIGHT_LIMIT = 20.0
"""exp of more says only that the sample is hopeless, and overflows in a product."""

LogWeightFn = Callable[[Array, SampleReducer | None], Array]
"""(log w of each token, what sums over samples need) -> the log of the weight that counts at each token."""


def token_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """log w_t, each token's own: the context it was drawn in is taken as it came."""
    return log_weights


def sequence_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Sum of log w_t over the sample: its whole probability, unbiased, and far from 1 in long samples."""
    assert reducer is not None
    return reducer.sum(log_weights)


def geometric_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Mean of log w_t over the sample, the level of GSPO's ratio."""
    assert reducer is not None
    return reducer.mean(log_weights)


class BoundedWeights(NamedTuple):
    weights: Float32[Array, "*tokens"]
    was_bounded: Bool[Array, "*tokens"]
    """The weight was not what it would have been."""


BoundFn = Callable[[Array], BoundedWeights]


def truncate_weights(weights: Float32[Array, "*tokens"], *, max_weight: float) -> BoundedWeights:
    """min(w, max): every token keeps a gradient, too small a one where the sampler thought much too little of it."""
    return BoundedWeights(jnp.minimum(weights, max_weight), weights > max_weight)


def mask_weights(weights: Float32[Array, "*tokens"], *, min_weight: float, max_weight: float) -> BoundedWeights:
    """w inside [min, max], else 0: what the two policies do not agree on teaches nothing."""
    outside = (weights < min_weight) | (weights > max_weight)
    return BoundedWeights(jnp.where(outside, 0.0, weights), outside)


class CorrectedWeights(NamedTuple):
    weights: Float32[Array, "R C"]
    """What each token's surrogate counts."""
    unbounded_weights: Float32[Array, "R C"]
    """The same before it was cut or vetoed."""
    was_bounded: Bool[Array, "R C"]
    vetoed: Bool[Array, "R C"]
    """Of a sample with a token that pi_old would hardly have drawn."""


@dataclass(frozen=True)
class ImportanceCorrection:
    """Log weights of tokens -> what they count.

    Args:
        log_weight: whose weight a token takes: its own, or its sample's.
        bound: what becomes of weights far from 1.
        veto: w of a single token below which its whole sample weighs 0; 0 = no sample does.
    """

    log_weight: LogWeightFn
    bound: BoundFn
    veto: float = 0.0

    def __call__(self, log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> CorrectedWeights:
        """Without a gradient. `log_weights` are pi_old's logprobs - mu's, 0 outside the mask.

        `means` may be None where each token has its own weight and there is no veto.
        """
        log_weights = jax.lax.stop_gradient(log_weights)
        level = jnp.clip(self.log_weight(log_weights, reducer), -LOG_WEIGHT_LIMIT, LOG_WEIGHT_LIMIT)
        unbounded = jnp.exp(level)
        weights, cut = self.bound(unbounded)
        vetoed = jnp.zeros_like(cut)
        if self.veto:
            assert reducer is not None
            vetoed = reducer.sum((log_weights < math.log(self.veto)).astype(jnp.float32)) > 0
        return CorrectedWeights(jnp.where(vetoed, 0.0, weights), unbounded, cut, vetoed)
