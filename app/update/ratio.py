"""How far the policy has moved from the one that its ratios are taken to: token by token, or sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from app.batching.pack import HostOrDevice


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SampleReducer:
    """What means and sums over each sample of packed rows need, beside the targets. No sample is split over rows."""

    weights: Float32[HostOrDevice, "R C"]
    """1 / (tokens of the sample that the policy wrote) on these, 0 elsewhere."""
    last_target_indices: Int32[HostOrDevice, "R C"]
    """Where in the row the last target of the same sample stands; one value on all padding."""

    def mean(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Each sample's mean over the tokens that the policy wrote, beside all of its targets."""
        return self._sum_per_sample(self.weights * values)

    def sum(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """Each sample's sum over the same tokens, beside all of its targets."""
        return self._sum_per_sample(jnp.where(self.weights > 0, values, 0.0))

    def _sum_per_sample(self, values: Float32[Array, "R C"]) -> Float32[Array, "R C"]:
        """A segmented scan: sums run over one sample alone, as a tree, in the same order every time."""
        starts = jnp.diff(self.last_target_indices, axis=1, prepend=-2) != 0
        _, sums = jax.lax.associative_scan(_segmented_add, (starts, values), axis=1)
        return jnp.take_along_axis(sums, jnp.maximum(self.last_target_indices, 0), axis=1)


def _segmented_add(
    before: tuple[Bool[Array, "*n"], Float32[Array, "*n"]], after: tuple[Bool[Array, "*n"], Float32[Array, "*n"]]
) -> tuple[Bool[Array, "*n"], Float32[Array, "*n"]]:
    """Associative: of two runs of tokens, the sum since the last start."""
    (started_before, left), (started_after, right) = before, after
    return started_before | started_after, jnp.where(started_after, right, left + right)


LogRatioFn = Callable[[Array, Array, SampleReducer | None], Array]
"""(current logprobs, proximal logprobs, what means over samples need) -> the log of each token's ratio."""


def token_log_ratio(
    current_logprobs: Float32[Array, "R C"], proximal_logprobs: Float32[Array, "R C"], reducer: SampleReducer | None
) -> Float32[Array, "R C"]:
    """log r_t = current_t - proximal_t. Source: Schulman et al. 2017, eq. 6."""
    return current_logprobs - proximal_logprobs


def sequence_log_ratio(
    current_logprobs: Float32[Array, "R C"], proximal_logprobs: Float32[Array, "R C"], reducer: SampleReducer | None
) -> Float32[Array, "R C"]:
    """log s = mean over the sample of (current - proximal), the same on all of its tokens.

    The gradient goes through every token's own logprob: exp of this is sg(s) * exp(current - sg(current)). Where a
    sample has one advantage its sum over the sample is that of s itself, |y| times.

    Source: Zheng et al. 2025 (GSPO), eqs. 7 and 14.
    """
    assert reducer is not None
    sequence = jax.lax.stop_gradient(reducer.mean(current_logprobs - proximal_logprobs))
    return sequence + (current_logprobs - jax.lax.stop_gradient(current_logprobs))
