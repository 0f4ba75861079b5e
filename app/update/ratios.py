"""Probability ratios: current / proximal policy for the surrogate, proximal policy / sampler for the correction.

The proximal policy is the one before the step's updates. The second ratio corrects for tokens sampled by another
policy: with mu the policy that sampled the token (`behavior_logprobs`), pi_old the proximal one and w = pi_old / mu,
the loss is sg(c(w)) * surrogate. The surrogate's ratio stays relative to pi_old, so the clip limits how much an update
changes, not how old a sample may be. If mu is pi_old, w is 1 and the loss is uncorrected.

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from app.model.segment_layout import HostOrDevice


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleReducer:
    """Computes means and sums over each sample in packed rows. No sample spans several rows."""

    weights: Float32[HostOrDevice, "R C"]
    """1 / n at each of the n tokens of a sample that the policy wrote; 0 elsewhere."""
    last_target_indices: Int32[HostOrDevice, "R C"]
    """For each target, the index in its row of its sample's last target; all padding has one common value."""

    def mean(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Returns, at every target, the mean over the tokens that the policy wrote in the same sample."""
        return self._sum_per_sample(self.weights * values)

    def sum(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Returns, at every target, the sum over the tokens that the policy wrote in the same sample."""
        return self._sum_per_sample(jnp.where(self.weights > 0, values, 0.0))

    def _sum_per_sample(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Sums each sample by a segmented scan, in a fixed tree order."""
        starts = jnp.diff(self.last_target_indices, axis=1, prepend=-2) != 0
        _, sums = jax.lax.associative_scan(_segmented_add, (starts, values), axis=1)
        return jnp.take_along_axis(sums, jnp.maximum(self.last_target_indices, 0), axis=1)


def _segmented_add(
    before: tuple[Bool[Array, "*n"], Float32[Array, "*n"]], after: tuple[Bool[Array, "*n"], Float32[Array, "*n"]]
) -> tuple[Bool[Array, "*n"], Float32[Array, "*n"]]:
    """Adds two (started, sum) pairs, where each sum is over the tokens since the last start; associative."""
    (started_before, left), (started_after, right) = before, after
    return started_before | started_after, jnp.where(started_after, right, left + right)


LogRatioFn = Callable[[Array, Array, SampleReducer | None], Array]
"""(current logprobs, proximal logprobs, reducer over samples) -> log ratio per token."""


def token_log_ratio(
    current_logprobs: Float32[Array, "R C"], proximal_logprobs: Float32[Array, "R C"], reducer: SampleReducer | None
) -> Float32[Array, "R C"]:
    """Returns log r_t = current_t - proximal_t. Source: Schulman et al. 2017, eq. 6."""
    return current_logprobs - proximal_logprobs


def sequence_log_ratio(
    current_logprobs: Float32[Array, "R C"], proximal_logprobs: Float32[Array, "R C"], reducer: SampleReducer | None
) -> Float32[Array, "R C"]:
    """Returns, at each token, log s = the mean of (current - proximal) over the tokens of its sample.

    The gradient passes through each token's own logprob: the token's ratio is sg(s) * exp(current - sg(current)), with
    sg for stop_gradient. With one advantage per sample, the gradients of a sample's tokens sum to the number of tokens
    times the gradient of s.

    Source: Zheng et al. 2025 (GSPO), eqs. 7 and 14.
    """
    assert reducer is not None
    sequence = jax.lax.stop_gradient(reducer.mean(current_logprobs - proximal_logprobs))
    return sequence + (current_logprobs - jax.lax.stop_gradient(current_logprobs))


LOG_RATIOS: Mapping[str, LogRatioFn] = {"token": token_log_ratio, "sequence": sequence_log_ratio}
"""Maps `algorithm.ratio_level` to the function for log ratios."""

LOG_WEIGHT_LIMIT = 20.0
"""Log weights are clipped to +-20, so that products with the weights cannot overflow."""

LogWeightFn = Callable[[Array, SampleReducer | None], Array]
"""(log w per token, reducer over samples) -> log of the weight applied to each token."""


def token_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Returns log w_t of each token, ignoring the probability of its context."""
    return log_weights


def sequence_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Returns the sum of log w_t over the sample: unbiased, but the weights of long samples have a high variance."""
    assert reducer is not None
    return reducer.sum(log_weights)


def geometric_log_weight(log_weights: Float32[Array, "R C"], reducer: SampleReducer | None) -> Float32[Array, "R C"]:
    """Returns the mean of log w_t over the sample, as in GSPO's ratio."""
    assert reducer is not None
    return reducer.mean(log_weights)


LOG_WEIGHTS: Mapping[str, LogWeightFn] = {
    "token": token_log_weight,
    "sequence": sequence_log_weight,
    "geometric": geometric_log_weight,
}
"""Maps `algorithm.correction_level` to the function for log weights."""

BoundFn = Callable[[Array], tuple[Array, Array]]
"""Weights -> bounded weights, and a mask of the weights that the bound changed."""


def truncate_weights(
    weights: Float32[Array, "*tokens"], *, max_weight: float
) -> tuple[Float32[Array, "*tokens"], Bool[Array, "*tokens"]]:
    """Returns min(w, max_weight), which keeps a gradient on every token, and a mask of the weights that it reduced."""
    return jnp.minimum(weights, max_weight), weights > max_weight


def mask_weights(
    weights: Float32[Array, "*tokens"], *, min_weight: float, max_weight: float
) -> tuple[Float32[Array, "*tokens"], Bool[Array, "*tokens"]]:
    """Returns w inside [min_weight, max_weight] and 0 outside it, and a mask of the weights that it zeroed."""
    outside = (weights < min_weight) | (weights > max_weight)
    return jnp.where(outside, 0.0, weights), outside


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
    """Converts log importance weights of tokens into bounded weights.

    Args:
        log_weight: one of `LOG_WEIGHTS`, which sets the level of the weights: per token or per sample.
        bound: `truncate_weights` or `mask_weights`, with their limits already set.
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
