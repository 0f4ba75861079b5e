"""The loss of given completions: cross-entropy, with the same token weights as for sampled completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.micro_batch_plan import MicroBatch
from app.batching.token_batch import HostOrDevice, TokenBatch, pack_per_token, pack_tokens
from app.records.sample import Sample
from app.update.loss_aggregation import AggregationFn, StepTotals, token_mean
from app.update.policy_loss import LossStats


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class CrossEntropyBatch:
    """One micro-batch of an optimizer step. Per-token fields align with the targets of `tokens`."""

    tokens: TokenBatch
    loss_weights: Float32[HostOrDevice, "R C"]
    """Weight of each token's loss; for it and `token_weights`, see `PolicyBatch`."""
    token_weights: Float32[HostOrDevice, "R C"]


@dataclass(frozen=True)
class CrossEntropyPacker:
    """Packs one micro-batch of given completions.

    Args:
        aggregation: weight of each token's loss; see `app.update.loss_aggregation`.
    """

    aggregation: AggregationFn
    fields = ("mask",)
    route_shape = None

    def __call__(self, samples: Sequence[Sample], micro_batch: MicroBatch, totals: StepTotals) -> CrossEntropyBatch:
        return CrossEntropyBatch(
            tokens=pack_tokens(samples, micro_batch),
            loss_weights=pack_per_token(samples, micro_batch, lambda s: self.aggregation(s, totals)),
            token_weights=pack_per_token(samples, micro_batch, lambda s: token_mean(s, totals)),
        )


class CrossEntropyLoss:
    """Computes sum(w * -log pi) over the tokens in the loss, and the mean entropy of the policy there."""

    entropy_coef = 0.0

    def __call__(
        self, logprobs: Float32[Array, "R C"], entropies: Float32[Array, "R C"], batch: CrossEntropyBatch
    ) -> tuple[Array, LossStats]:
        """Returns this micro-batch's share of the loss and the metrics; logprobs are undefined outside the mask."""
        loss = -jnp.sum(batch.loss_weights * jnp.where(batch.tokens.loss_mask, logprobs, 0.0))
        sums = {"loss": loss, "policy/entropy": jnp.sum(batch.token_weights * entropies)}
        return loss, jax.lax.stop_gradient(LossStats(sums, {}))
