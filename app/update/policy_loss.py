"""The loss of one micro-batch: surrogate, KL penalty and entropy bonus, weighted token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.batching.forward_passes import row_logprobs
from app.batching.token_batch import HostOrDevice, TokenBatch
from app.model.decoder import DecoderDefinition, Params
from app.update.importance_correction import ImportanceCorrection
from app.update.kl import KLEstimator, k3
from app.update.log_ratio import LogRatioFn, SampleReducer, token_log_ratio
from app.update.route_metrics import RouteCounts, count_routes, route_metrics
from app.update.surrogate import SurrogateFn


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyBatch:
    """One micro-batch of an optimizer step. Per-token fields align with the targets of `tokens`."""

    tokens: TokenBatch
    behavior_logprobs: Float32[HostOrDevice, "R C"]
    advantages: Float32[HostOrDevice, "R C"]
    loss_weights: Float32[HostOrDevice, "R C"]
    """Weight of each token's loss in the sum; see `app.update.loss_aggregation`."""
    token_weights: Float32[HostOrDevice, "R C"]
    """1 / (tokens of the step) on tokens that the policy wrote, for means in the metrics."""
    policy_logprobs: Float32[HostOrDevice, "R C"] | None
    """None if the step has only one update: its own logprobs then serve as the proximal ones."""
    reference_logprobs: Float32[HostOrDevice, "R C"] | None
    """None without a KL penalty in the loss or in the reward."""
    sample_reducer: SampleReducer | None = None
    """None if ratios and corrections are per token."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossStats:
    """Statistics of micro-batches; `+` adds `sums` and `squares` and takes the larger of `maxima`."""

    sums: dict[str, Float32[Array, ""]]
    maxima: dict[str, Float32[Array, ""]]
    squares: dict[str, Float32[Array, ""]] = field(default_factory=dict)
    """Mean squares of weights; their means are in `sums` as `<name>_mean`."""
    routes: RouteCounts | None = None
    """None without experts."""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            jax.tree.map(jnp.add, self.sums, other.sums),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            jax.tree.map(jnp.add, self.squares, other.squares),
            jax.tree.map(jnp.add, self.routes, other.routes),
        )

    def metrics(self) -> dict[str, Float32[Array, ""]]:
        """Returns the metrics of a whole optimizer step. `<name>_ess` is (sum w)^2 / (n sum w^2) for n weights.

        Source: Kong 1992, "A note on importance sampling using standardized weights"; 0 if all weights are 0.
        """
        shares = {
            f"{name}_ess": jnp.where(square > 0, self.sums[f"{name}_mean"] ** 2 / square, 0.0)
            for name, square in self.squares.items()
        }
        return {**self.sums, **self.maxima, **shares, **(route_metrics(self.routes) if self.routes else {})}


ProximalLogprobsFn = Callable[[Array, PolicyBatch], Array]
Objective = Callable[[Params, PolicyBatch, Array], tuple[Array, LossStats]]


def detached_logprobs(current_logprobs: Array, batch: PolicyBatch) -> Array:
    """Returns the update's own logprobs without gradient: with one update per rollout, the ratio is exactly 1."""
    return jax.lax.stop_gradient(current_logprobs)


def scored_logprobs(current_logprobs: Array, batch: PolicyBatch) -> Array:
    """Returns the logprobs scored before the first of several updates."""
    assert batch.policy_logprobs is not None
    return batch.policy_logprobs


@dataclass(frozen=True)
class PolicyLoss:
    """Per-token losses of one micro-batch, weighted into its share of the step's loss.

    The loss is sum(w * (c * surrogate + beta * KL - entropy_coef * H)), where w are the step's `loss_weights` and c the
    weights of the correction. The correction applies neither to KL nor to entropy: the entropy is over the whole
    vocabulary, and the penalty must not ignore the tokens whose probability has changed most.
    """

    proximal_logprobs_fn: ProximalLogprobsFn
    surrogate: SurrogateFn
    kl_estimator: KLEstimator | None
    """Estimator of the penalty and of `policy/kl`, even if the penalty is in the reward; None without a reference."""
    beta: float
    """Weight of the penalty in this loss; 0 if it is in the reward."""
    entropy_coef: float
    log_ratio: LogRatioFn = token_log_ratio
    correction: ImportanceCorrection | None = None
    """None = the sampler is taken to be the policy before the step's updates."""

    def __call__(
        self, logprobs: Float32[Array, "R C"], entropies: Float32[Array, "R C"], batch: PolicyBatch
    ) -> tuple[Array, LossStats]:
        """Returns this micro-batch's share of the loss and the metrics; logprobs are undefined outside the mask."""
        mask = batch.tokens.loss_mask
        # Logprobs are undefined on padding; equal ones there keep ratios at 1 and differences at 0.
        current = jnp.where(mask, logprobs, batch.behavior_logprobs)
        proximal_logprobs = jnp.where(mask, self.proximal_logprobs_fn(current, batch), batch.behavior_logprobs)
        log_ratios = self.log_ratio(current, proximal_logprobs, batch.sample_reducer)
        surrogate = self.surrogate(log_ratios, current, batch.advantages)

        def mean(x: Array) -> Array:
            return jnp.sum(batch.token_weights * x)

        difference = jnp.abs(current - batch.behavior_logprobs)
        per_token, corrected = self._apply_correction(surrogate.loss, proximal_logprobs, batch)
        sums = {
            "policy/entropy": mean(entropies),
            "policy/clip_fraction_low": mean(surrogate.clipped_low),
            "policy/clip_fraction_high": mean(surrogate.clipped_high),
            "policy/clip_fraction_dual": mean(surrogate.clipped_dual),
            "rollout/sampler_scorer_kl": mean(k3(batch.behavior_logprobs, current)),
            "rollout/sampler_scorer_logprob_diff_mean": mean(difference),
        }
        if self.kl_estimator is not None:
            assert batch.reference_logprobs is not None
            kl = self.kl_estimator(current, jnp.where(mask, batch.reference_logprobs, current))
            sums["policy/kl"] = mean(kl)
            if self.beta:
                per_token += self.beta * kl
        if self.entropy_coef:
            per_token -= self.entropy_coef * entropies
        loss = jnp.sum(batch.loss_weights * per_token)
        maxima = {
            "policy/ratio_max": jnp.max(jnp.where(mask, surrogate.ratio, 0.0)),
            "rollout/sampler_scorer_logprob_diff_max": jnp.max(difference),
        }
        parts = LossStats({"loss": loss, **sums, **corrected.sums}, maxima | corrected.maxima, corrected.squares)
        return loss, jax.lax.stop_gradient(parts)

    def _apply_correction(
        self, losses: Float32[Array, "R C"], proximal_logprobs: Float32[Array, "R C"], batch: PolicyBatch
    ) -> tuple[Float32[Array, "R C"], LossStats]:
        """Returns the surrogate's losses, weighted by the correction if there is one, and its statistics."""
        if self.correction is None:
            return losses, LossStats({}, {})
        corrected = self.correction(proximal_logprobs - batch.behavior_logprobs, batch.sample_reducer)

        def mean(x: Array) -> Array:
            return jnp.sum(batch.token_weights * x)

        sums = {
            "policy/correction_mean": mean(corrected.weights),
            "policy/correction_cut_fraction": mean(corrected.was_bounded),
            "policy/veto_fraction": mean(corrected.vetoed),
        }
        maxima = {"policy/correction_max": jnp.max(jnp.where(batch.tokens.loss_mask, corrected.unbounded_weights, 0.0))}
        squares = {"policy/correction": mean(corrected.weights**2)}
        return corrected.weights * losses, LossStats(sums, maxima, squares)


def make_policy_objective(
    definition: DecoderDefinition, policy_loss: PolicyLoss, *, dtype: jnp.dtype, remat: str, logits_chunk: int
) -> Objective:
    """Returns the function (params, one micro-batch, temperature) -> (its share of the loss, of the metrics)."""

    def objective(params: Params, batch: PolicyBatch, temperature: Array) -> tuple[Array, LossStats]:
        logprobs, entropies, routes = row_logprobs(
            definition.bind(params),
            batch.tokens,
            temperature=temperature,
            dtype=dtype,
            remat=remat,
            logits_chunk=logits_chunk,
            entropy_gradient=policy_loss.entropy_coef != 0,
        )
        loss, stats = policy_loss(logprobs, entropies, batch)
        num_experts = definition.architecture.num_experts
        if num_experts is None or routes is None:
            return loss, stats
        return loss, replace(stats, routes=count_routes(routes, batch.tokens, num_experts))

    return objective
