"""Log ratios of the current to the proximal policy, per token or per sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from app.batching.token_batch import HostOrDevice


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleReducer:
    """Computes means and sums over each sample in packed rows. No sample spans several rows."""

    weights: Float32[HostOrDevice, "R C"]
    """1 / n on the n tokens of a sample that the policy wrote, 0 elsewhere."""
    last_target_indices: Int32[HostOrDevice, "R C"]
    """Index in the row of the last target of the same sample; the same value on all padding."""

    def mean(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Returns, at every target, the mean over the tokens that the policy wrote in the same sample."""
        return self._sum_per_sample(self.weights * values)

    def sum(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Returns, at every target, the sum over the tokens that the policy wrote in the same sample."""
        return self._sum_per_sample(jnp.where(self.weights > 0, values, 0.0))

    def _sum_per_sample(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Sums each sample by a segmented scan, which adds in the fixed order of a tree."""
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
    """Returns log s = mean over the sample of (current - proximal), the same for all of its tokens.

    The gradient passes through each token's own logprob: exp of it is sg(s) * exp(current - sg(current)). With one
    advantage per sample, its sum over the sample is |y| times the gradient of s.

    Source: Zheng et al. 2025 (GSPO), eqs. 7 and 14.
    """
    assert reducer is not None
    sequence = jax.lax.stop_gradient(reducer.mean(current_logprobs - proximal_logprobs))
    return sequence + (current_logprobs - jax.lax.stop_gradient(current_logprobs))
