"""The loss of one micro-batch: surrogate, KL penalty and entropy bonus, weighted token by token.

    loss = sum over tokens of  w * (c * surrogate(r, A) + beta * KL - entropy_coef * H)

A is the advantage, r the ratio of the current to the proximal policy, c the importance weight (both in
`app.update.ratios`), and w the weight that aggregates tokens (`app.update.loss_aggregation`). Each `algorithm.name`
selects these parts:

    name                 A (estimator)        r         surrogate          w                         KL
    grpo                 grpo                 token     clipped            token-mean                k3 in the loss
    dr_grpo              dr_grpo              token     clipped            constant-length           k3 in the loss
    rloo                 rloo                 token     clipped            sequence-mean-token-sum   k1 in the reward
    maxrl                maxrl                token     clipped            token-mean                k3 in the loss
    reinforce_plus_plus  reinforce_plus_plus  token     clipped            token-mean                k1 in the reward
    gspo                 grpo                 sequence  clipped, narrower  sequence-mean-token-mean  k3 in the loss
    dapo                 grpo                 token     clipped, higher    token-mean                k3 in the loss
    cispo                grpo                 token     cispo              token-mean                k3 in the loss
    ppo                  gae                  token     clipped            token-mean                k1 in the reward
    distill              grpo                 token     clipped            token-mean                k1 in the advantage

`sft` has its own loss, `CrossEntropyLoss`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from app.batching.forward_passes import row_logprobs
from app.batching.token_batch import TokenBatch
from app.model.decoder import DecoderDefinition, Params
from app.model.segment_layout import HostOrDevice
from app.update.kl import KLEstimator, k1, k3
from app.update.ratios import ImportanceCorrection, LogRatioFn, SampleReducer, token_log_ratio
from app.update.route_metrics import RouteCounts, count_routes, route_metrics

LOG_RATIO_LIMIT = 20.0
"""Log ratios are clipped to +-20, so that the loss cannot overflow."""


class SurrogateOutput(NamedTuple):
    loss: Float32[Array, "*tokens"]
    ratio: Float32[Array, "*tokens"]
    clipped_low: Bool[Array, "*tokens"]
    """True if the clip removed the gradient of a token with A < 0 that was already too unlikely; for CISPO, if it
    raised the token's weight to 1 - low, whatever the sign of A."""
    clipped_high: Bool[Array, "*tokens"]
    """True if the clip removed the gradient of a token with A > 0 that was already too likely; for CISPO, if it
    lowered the token's weight to 1 + high, whatever the sign of A."""
    clipped_dual: Bool[Array, "*tokens"]
    """True if the dual clip removed the gradient of a token with A < 0 that had become far too likely."""


SurrogateFn = Callable[[Array, Array, Array], SurrogateOutput]
"""(log ratios, current logprobs, advantages) -> per-token losses, ratios and masks of clipped tokens."""


def clipped_surrogate(
    log_ratios: Float32[Array, "*tokens"],
    current_logprobs: Float32[Array, "*tokens"],
    advantages: Float32[Array, "*tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateOutput:
    """Computes the per-token loss max(-A r, -A clip(r, 1 - low, 1 + high)) for the ratio r; ignores `current_logprobs`.

    At r = 1 its gradient is the REINFORCE gradient, -A * grad(current_logprobs).

    Sources: Schulman et al. 2017, eq. 7; separate bounds: Yu et al. 2025 (DAPO), eq. 10.
    """
    ratio = _ratios(log_ratios)
    clipped = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    loss = jnp.maximum(-advantages * ratio, -advantages * clipped)
    return SurrogateOutput(
        loss,
        ratio,
        clipped_low=(ratio < 1.0 - clip_low) & (advantages < 0),
        clipped_high=(ratio > 1.0 + clip_high) & (advantages > 0),
        clipped_dual=jnp.zeros_like(ratio, bool),
    )


def dual_clipped_surrogate(
    log_ratios: Float32[Array, "*tokens"],
    current_logprobs: Float32[Array, "*tokens"],
    advantages: Float32[Array, "*tokens"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float,
) -> SurrogateOutput:
    """Computes `clipped_surrogate`, but bounds the loss for A < 0 by -A c, where c = `dual_clip` > 1.

    The ratio of a token that was nearly impossible and is now likely is unbounded. The upper clip bounds the loss for
    A > 0; only the dual clip bounds it for A < 0.

    Source: Ye et al. 2020, "Mastering Complex Control in MOBA Games with Deep Reinforcement Learning", eq. 5.
    """
    once = clipped_surrogate(log_ratios, current_logprobs, advantages, clip_low=clip_low, clip_high=clip_high)
    beyond = (once.ratio > dual_clip) & (advantages < 0)
    return once._replace(loss=jnp.where(beyond, -advantages * dual_clip, once.loss), clipped_dual=beyond)


def cispo_surrogate(
    log_ratios: Float32[Array, "*tokens"],
    current_logprobs: Float32[Array, "*tokens"],
    advantages: Float32[Array, "*tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateOutput:
    """Computes the loss -sg(clip(r, 1 - low, 1 + high)) A log pi: each token keeps a gradient with a bounded weight.

    At r = 1 its gradient is the REINFORCE gradient, -A * grad(current_logprobs).

    Source: MiniMax 2025, "MiniMax-M1", eqs. 4 and 5.
    """
    ratio = jax.lax.stop_gradient(_ratios(log_ratios))
    weights = jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high)
    return SurrogateOutput(
        -weights * advantages * current_logprobs,
        ratio,
        clipped_low=ratio < 1.0 - clip_low,
        clipped_high=ratio > 1.0 + clip_high,
        clipped_dual=jnp.zeros_like(ratio, bool),
    )


SURROGATES: Mapping[str, Callable[..., SurrogateOutput]] = {"ppo": clipped_surrogate, "cispo": cispo_surrogate}
"""Maps `algorithm.clip` to a surrogate; `algorithm.dual_clip` adds a second clip."""


def _ratios(log_ratios: Float32[Array, "*tokens"]) -> Float32[Array, "*tokens"]:
    return jnp.exp(jnp.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PolicyBatch:
    """One micro-batch of the policy's optimizer step. Per-token fields align with the targets of `tokens`."""

    tokens: TokenBatch
    behavior_logprobs: Float32[HostOrDevice, "R C"]
    advantages: Float32[HostOrDevice, "R C"]
    loss_weights: Float32[HostOrDevice, "R C"]
    """Weight of each token's loss in the sum; see `app.update.loss_aggregation`."""
    token_weights: Float32[HostOrDevice, "R C"]
    """1 / (tokens of the step) on tokens that the policy wrote, 0 elsewhere; for means in the metrics."""
    policy_logprobs: Float32[HostOrDevice, "R C"] | None
    """Logprobs of the proximal policy; None if the step has only one update, which uses the current logprobs."""
    reference_logprobs: Float32[HostOrDevice, "R C"] | None
    """Logprobs of the reference policy; None if there is no reference."""
    sample_reducer: SampleReducer | None = None
    """Reducer over each sample's tokens; None if ratios, corrections and metrics are per token."""
    sample_weights: Float32[HostOrDevice, "R C"] | None = None
    """1 / (tokens of the sample * samples of the step), for means over samples; None = no metric needs it."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossStats:
    """Statistics of micro-batches; `+` takes the larger of `maxima` and adds everything else."""

    sums: dict[str, Float32[Array, ""]]
    maxima: dict[str, Float32[Array, ""]]
    squares: dict[str, Float32[Array, ""]] = field(default_factory=dict)
    """Maps the name of weights to their mean square; their mean is in `sums` as `<name>_mean`."""
    routes: RouteCounts | None = None
    """Counts of the tokens' expert routes; None for a model without experts."""

    def __add__(self, other: LossStats) -> LossStats:
        return LossStats(
            jax.tree.map(jnp.add, self.sums, other.sums),
            jax.tree.map(jnp.maximum, self.maxima, other.maxima),
            jax.tree.map(jnp.add, self.squares, other.squares),
            jax.tree.map(jnp.add, self.routes, other.routes),
        )

    def metrics(self) -> dict[str, Float32[Array, ""]]:
        """Returns the metrics of a whole optimizer step.

        `<name>_ess` is (sum w)^2 / (n sum w^2) for n weights w, or 0 if all weights are 0. Source: Kong 1992, "A note
        on importance sampling using standardized weights".
        """
        shares = {
            f"{name}_ess": jnp.where(square > 0, self.sums[f"{name}_mean"] ** 2 / square, 0.0)
            for name, square in self.squares.items()
        }
        return {**self.sums, **self.maxima, **shares, **(route_metrics(self.routes) if self.routes else {})}


def mismatch_sums(batch: PolicyBatch, current: Float32[Array, "R C"]) -> dict[str, Float32[Array, ""]]:
    """Returns this micro-batch's share of `mismatch_metrics`, computed from `current` instead of scored logprobs."""
    assert batch.sample_reducer is not None and batch.sample_weights is not None
    behavior, reducer, weights = batch.behavior_logprobs, batch.sample_reducer, batch.sample_weights
    return {
        "mismatch/training_ppl": jnp.sum(weights * jnp.exp(-reducer.mean(current))),
        "mismatch/rollout_ppl": jnp.sum(weights * jnp.exp(-reducer.mean(behavior))),
        "mismatch/log_ppl_diff": jnp.sum(weights * (behavior - current)),
        "mismatch/kl": jnp.sum(batch.token_weights * k1(behavior, current)),
        "mismatch/k3_kl": jnp.sum(batch.token_weights * k3(behavior, current)),
    }


KL_METRIC, TEACHER_KL_METRIC = "policy/kl", "policy/teacher_kl"

Objective = Callable[[Params, Any, Array], tuple[Array, LossStats]]
"""(params, one micro-batch, temperature) -> (the micro-batch's share of the loss, its share of the metrics)."""


@dataclass(frozen=True)
class PolicyLoss:
    """Computes a micro-batch's share of the step's loss, a weighted sum of per-token losses.

    The importance correction applies neither to KL nor to entropy: the entropy is over the whole vocabulary, and the
    KL penalty must not ignore the tokens whose probability has changed most.
    """

    surrogate: SurrogateFn
    kl_estimator: KLEstimator | None
    """Estimator of the KL penalty, wherever it is applied, and of the KL metric; None without a reference."""
    beta: float
    """Weight of the KL penalty in this loss; 0 if the penalty is in the reward or the advantage."""
    entropy_coef: float
    kl_metric: str = KL_METRIC
    """Name of the KL metric: `TEACHER_KL_METRIC` if the reference is a teacher, otherwise `KL_METRIC`."""
    log_ratio: LogRatioFn = token_log_ratio
    correction: ImportanceCorrection | None = None
    """Importance correction; None = tokens are treated as sampled by the proximal policy."""

    def __call__(
        self, logprobs: Float32[Array, "R C"], entropies: Float32[Array, "R C"], batch: PolicyBatch
    ) -> tuple[Array, LossStats]:
        """Returns this micro-batch's share of the loss and of the metrics; ignores logprobs outside the loss mask."""
        mask = batch.tokens.loss_mask
        # Logprobs are undefined on padding; equal ones there keep ratios at 1 and differences at 0.
        current = jnp.where(mask, logprobs, batch.behavior_logprobs)
        # With one update per rollout, the ratio is exactly 1 and its gradient equals the logprobs'.
        scored = jax.lax.stop_gradient(current) if batch.policy_logprobs is None else batch.policy_logprobs
        proximal_logprobs = jnp.where(mask, scored, batch.behavior_logprobs)
        log_ratios = self.log_ratio(current, proximal_logprobs, batch.sample_reducer)
        surrogate = self.surrogate(log_ratios, current, batch.advantages)

        def mean(x: Array) -> Array:
            return jnp.sum(batch.token_weights * x)

        difference = jnp.abs(current - batch.behavior_logprobs)
        sums = {
            "policy/entropy": mean(entropies),
            "policy/clip_fraction_low": mean(surrogate.clipped_low),
            "policy/clip_fraction_high": mean(surrogate.clipped_high),
            "policy/clip_fraction_dual": mean(surrogate.clipped_dual),
            "rollout/sampler_scorer_kl": mean(k3(batch.behavior_logprobs, current)),
            "rollout/sampler_scorer_logprob_diff_mean": mean(difference),
        }
        maxima = {
            "policy/ratio_max": jnp.max(jnp.where(mask, surrogate.ratio, 0.0)),
            "rollout/sampler_scorer_logprob_diff_max": jnp.max(difference),
        }
        if batch.policy_logprobs is None and batch.sample_weights is not None:
            sums |= mismatch_sums(batch, current)
        squares, per_token = {}, surrogate.loss
        if self.correction is not None:
            corrected = self.correction(proximal_logprobs - batch.behavior_logprobs, batch.sample_reducer)
            per_token = corrected.weights * per_token
            sums["policy/correction_mean"] = mean(corrected.weights)
            sums["policy/correction_cut_fraction"] = mean(corrected.was_bounded)
            sums["policy/veto_fraction"] = mean(corrected.vetoed)
            maxima["policy/correction_max"] = jnp.max(jnp.where(mask, corrected.unbounded_weights, 0.0))
            squares["policy/correction"] = mean(corrected.weights**2)
        if self.kl_estimator is not None:
            assert batch.reference_logprobs is not None
            kl = self.kl_estimator(current, jnp.where(mask, batch.reference_logprobs, current))
            sums[self.kl_metric] = mean(kl)
            if self.beta:
                per_token += self.beta * kl
        if self.entropy_coef:
            per_token -= self.entropy_coef * entropies
        loss = jnp.sum(batch.loss_weights * per_token)
        return loss, jax.lax.stop_gradient(LossStats({"loss": loss, **sums}, maxima, squares))


class CrossEntropyLoss:
    """The loss of supervised fine-tuning: sum(w * -log pi), with token weights w as in `PolicyLoss`."""

    entropy_coef = 0.0

    def __call__(
        self, logprobs: Float32[Array, "R C"], entropies: Float32[Array, "R C"], batch: PolicyBatch
    ) -> tuple[Array, LossStats]:
        """Returns this micro-batch's share of the loss and of the metrics; the entropy is only a metric."""
        loss = -jnp.sum(batch.loss_weights * jnp.where(batch.tokens.loss_mask, logprobs, 0.0))
        sums = {"loss": loss, "policy/entropy": jnp.sum(batch.token_weights * entropies)}
        return loss, jax.lax.stop_gradient(LossStats(sums, {}))


def make_policy_objective(
    definition: DecoderDefinition,
    loss_fn: PolicyLoss | CrossEntropyLoss,
    *,
    dtype: jnp.dtype,
    remat: str,
    logits_chunk: int,
) -> Objective:
    """Returns an objective that applies `loss_fn` to the results of `row_logprobs`, which documents the options."""

    def objective(params: Params, batch: Any, temperature: Array) -> tuple[Array, LossStats]:
        logprobs, entropies, routes = row_logprobs(
            definition.bind(params),
            batch.tokens,
            temperature=temperature,
            dtype=dtype,
            remat=remat,
            logits_chunk=logits_chunk,
            entropy_gradient=loss_fn.entropy_coef != 0,
        )
        loss, stats = loss_fn(logprobs, entropies, batch)
        num_experts = definition.architecture.num_experts
        if num_experts is None or routes is None:
            return loss, stats
        return loss, replace(stats, routes=count_routes(routes, batch.tokens, num_experts))

    return objective
