"""Policy surrogates that differ in their clipping: (log ratios, current logprobs, advantages) -> per-token losses.

The ratio is per token or per sample: see `app.update.log_ratio`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

LOG_RATIO_LIMIT = 20.0
"""Clip bound of log ratios, against overflow of the loss."""


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
"""(log ratios, current logprobs, advantages) -> per-token losses."""


def clipped_surrogate(
    log_ratios: Float32[Array, "*tokens"],
    current_logprobs: Float32[Array, "*tokens"],
    advantages: Float32[Array, "*tokens"],
    *,
    clip_low: float,
    clip_high: float,
) -> SurrogateOutput:
    """Computes the per-token loss max(-A r, -A clip(r, 1 - low, 1 + high)) for the ratio r; ignores `current_logprobs`.

    At r = 1 its gradient is REINFORCE's: -A * grad(current_logprobs).

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
    A > 0; only the dual clip does for A < 0.

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

    At r = 1 its gradient is REINFORCE's: -A * grad(current_logprobs).

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


def _ratios(log_ratios: Float32[Array, "*tokens"]) -> Float32[Array, "*tokens"]:
    return jnp.exp(jnp.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
