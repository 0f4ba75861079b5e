"""The policy surrogates, by how they clip: (log ratios, current logprobs, advantages) -> per-token losses.

A ratio may be the token's own or its sample's: see `app.update.ratio`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

LOG_RATIO_LIMIT = 20.0
"""exp of more overflows the loss long before clipping could help."""


class SurrogateOutput(NamedTuple):
    loss: Float32[Array, "*tokens"]
    ratio: Float32[Array, "*tokens"]
    clipped_low: Bool[Array, "*tokens"]
    """The gradient was cut because a disadvantaged token had already become too unlikely; CISPO's, that of any token,
    is held up to 1 - low."""
    clipped_high: Bool[Array, "*tokens"]
    """The gradient was cut because an advantaged token had already become too likely; CISPO's, that of any token, is
    held down to 1 + high."""
    clipped_dual: Bool[Array, "*tokens"]
    """The gradient was cut because a disadvantaged token had become so likely that it would rule the step."""


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
    """Per-token loss max(-A r, -A clip(r, 1 - low, 1 + high)), r the ratio. The logprobs themselves are not read.

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
    """`clipped_surrogate`, and where A < 0 at most -A c, with c = `dual_clip` > 1.

    A token that was nearly impossible and is now likely has a ratio without bound; a positive advantage meets the
    clip above, a negative one only this.

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
    """Per-token loss -sg(clip(r, 1 - low, 1 + high)) A log pi: every token keeps its gradient, its weight is bounded.

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
