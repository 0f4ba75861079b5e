"""V-trace: value targets and advantages of samples that another policy drew, on the recurrence of GAE."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.advantage.gae.choice import choose
from app.advantage.gae.estimate import BACKENDS, Number
from app.advantage.gae.terms import MASK_MODES, HostOrDevice, Terms, as_float32, rows_of

LOG_RATIO_LIMIT = 20.0
"""Beyond it a ratio is clipped by any sensible bound, and would overflow."""


class VTrace(NamedTuple):
    """0 where the mask is False."""

    advantages: Float32[HostOrDevice, "B T"]
    """Of the policy gradient: min(rho_bar, rho_t) * (r_t + gamma * target_{t+1} - V_t)."""
    targets: Float32[HostOrDevice, "B T"]
    """Of the critic: v_t."""


def vtrace(
    rewards: HostOrDevice,
    values: HostOrDevice,
    log_ratios: HostOrDevice,
    *,
    gamma: Number,
    lam: Number,
    max_ratio: float = 1.0,
    max_trace: float = 1.0,
    mask: HostOrDevice | None = None,
    ends: HostOrDevice | None = None,
    bootstrap: HostOrDevice | None = None,
    mask_mode: str = "skip",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> VTrace:
    """v_t - V_t = rho_t * delta_t + gamma * c_t * (v_{t+1} - V_{t+1}), delta_t = r_t + gamma * V_{t+1} - V_t.

    With rho_t = min(max_ratio, ratio_t) and c_t = lam * min(max_trace, ratio_t). Where all ratios are 1 the targets are
    those of GAE; with lam = 1 the advantages are, too.

    Args:
        log_ratios: [B, T], log of the target policy's probability over that of the policy that drew the token.
        max_ratio: rho_bar, at least `max_trace`: decides which policy's values these are.
        max_trace: c_bar: decides only how fast they are found.

    The other arguments are those of `app.advantage.gae.estimate.generalized_advantages`.

    Source: Espeholt et al. 2018 (IMPALA), eq. 1 and section 4.2; lambda: remark 2.
    """
    choice = choose(backend, rewards.shape, per_token_decay=True, chunk_size=chunk_size)
    bounds = as_float32(max_ratio), as_float32(max_trace)
    numbers = as_float32(gamma), as_float32(lam)
    return _vtrace(
        rewards,
        values,
        log_ratios,
        numbers,
        bounds,
        mask,
        ends,
        bootstrap,
        mask_mode,
        choice.backend,
        choice.chunk_size,
    )


@functools.partial(jax.jit, static_argnums=(8, 9, 10))
def _vtrace(
    rewards: HostOrDevice,
    values: HostOrDevice,
    log_ratios: HostOrDevice,
    numbers: tuple[Array, Array],
    bounds: tuple[Array, Array],
    mask: HostOrDevice | None,
    ends: HostOrDevice | None,
    bootstrap: HostOrDevice | None,
    mask_mode: str,
    backend: str,
    chunk_size: int,
) -> VTrace:
    (gamma, lam), (max_ratio, max_trace) = numbers, bounds
    rows = rows_of(rewards, values, mask=mask, ends=ends, bootstrap=bootstrap)
    terms = MASK_MODES[mask_mode](rows, gamma, lam)
    log_ratios = jnp.asarray(log_ratios, jnp.float32)
    if rows.mask is not None:
        # A token that the policy did not write has no ratio.
        log_ratios = jnp.where(rows.mask, log_ratios, 0.0)
    ratios = jnp.exp(jnp.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    weights, traces = jnp.minimum(max_ratio, ratios), jnp.minimum(max_trace, ratios)
    nothing = jnp.zeros_like(terms.values)
    weighted = Terms(
        rewards=weights * terms.deltas,
        values=nothing,
        next_values=nothing,
        discounts=as_float32(0.0),
        decays=terms.decays * jnp.where(_passes_over(terms), 1.0, traces),
        mask=None,
    )
    corrections = BACKENDS[backend](weighted, chunk_size).advantages
    behind = jnp.pad(corrections[:, 1:], ((0, 0), (0, 1)))[:, : corrections.shape[1]]
    advantages = weights * (terms.deltas + rows.until_ends(jnp.broadcast_to(gamma, behind.shape)) * behind)
    credit = terms.credit(corrections)
    return VTrace(advantages if rows.mask is None else jnp.where(rows.mask, advantages, 0.0), credit.returns)


def _passes_over(terms: Terms) -> Array:
    """Masked tokens hand on what is behind them as it is, whatever ratio stands beside them."""
    return jnp.zeros_like(terms.values, bool) if terms.mask is None else ~terms.mask
