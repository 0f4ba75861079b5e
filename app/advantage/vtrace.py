"""V-trace: value targets and advantages for off-policy samples, computed with the GAE recurrence."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.estimate import solve_recurrence
from app.advantage.gae.recurrence import MASK_MODES, Discounts, HostOrDevice, Number, RecurrenceTerms, make_gae_rows

LOG_RATIO_LIMIT = 20.0
"""Clip bound of log ratios, against overflow; sensible values of `max_ratio` and `max_trace` clip earlier."""


class VTraceOutput(NamedTuple):
    """Advantages and targets; 0 where the mask is False."""

    advantages: Float32[HostOrDevice, "B T"]
    """r_t + gamma * (lam * v_{t+1} + (1 - lam) * V_{t+1}) - V_t, without the factor rho_t of the policy gradient.

    The loss applies rho_t. If it were part of the advantage, whitening would give a token with rho 0 the advantage
    -mean / std at full weight.
    """
    targets: Float32[HostOrDevice, "B T"]
    """The critic's targets v_t."""


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
) -> VTraceOutput:
    """Solves v_t - V_t = rho_t * delta_t + gamma * c_t * (v_{t+1} - V_{t+1}), delta_t = r_t + gamma V_{t+1} - V_t.

    Here rho_t = min(max_ratio, ratio_t) and c_t = lam * min(max_trace, ratio_t). If all ratios are 1, targets and
    advantages are those of GAE.

    Args:
        log_ratios: [B, T], log(pi / mu), where pi is the target policy and mu the policy that sampled the token.
        max_ratio: rho_bar, at least `max_trace`; it determines which policy the values belong to.
        max_trace: c_bar; it determines only the speed of convergence.

    The other arguments are those of `app.advantage.gae.estimate.generalized_advantages`.

    Source: Espeholt et al. 2018 (IMPALA), eq. 1 and section 4.2; lambda: remark 2 for the targets, rlax for the
    advantages. Both multiply the advantages by rho_t.
    """
    choice = choose_backend(backend, one_decay=False, chunk_size=chunk_size)
    bounds = jnp.asarray(max_ratio, jnp.float32), jnp.asarray(max_trace, jnp.float32)
    return _vtrace(
        rewards,
        values,
        log_ratios,
        Discounts.create(gamma, lam),
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
    discounts: Discounts,
    bounds: tuple[Array, Array],
    mask: HostOrDevice | None,
    ends: HostOrDevice | None,
    bootstrap: HostOrDevice | None,
    mask_mode: str,
    backend: str,
    chunk_size: int | None,
) -> VTraceOutput:
    rows = make_gae_rows(rewards, values, mask=mask, ends=ends, bootstrap=bootstrap)
    terms = MASK_MODES[mask_mode](rows, discounts)
    log_ratios = jnp.asarray(log_ratios, jnp.float32)
    if rows.mask is not None:
        # A token that the policy did not write has no ratio.
        log_ratios = jnp.where(rows.mask, log_ratios, 0.0)
    ratios = jnp.exp(jnp.clip(log_ratios, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    weights, traces = (jnp.minimum(bound, ratios) for bound in bounds)
    if rows.mask is not None:
        # Such a token passes the next correction on unchanged.
        traces = jnp.where(rows.mask, traces, 1.0)
    leaks = rows.reset_at_ends(jnp.broadcast_to(terms.one_minus_decay, traces.shape))
    zeros = jnp.zeros_like(traces)
    corrections = solve_recurrence(
        RecurrenceTerms(weights * terms.deltas, zeros, zeros, zeros, leaks + (1 - leaks) * (1 - traces), None),
        backend,
        chunk_size,
    ).advantages
    next_corrections = jnp.pad(corrections[:, 1:], ((0, 0), (0, 1)))[:, : corrections.shape[1]]
    advantages = terms.deltas + (1 - leaks) * next_corrections
    return VTraceOutput(
        advantages if rows.mask is None else jnp.where(rows.mask, advantages, 0.0),
        terms.to_output(corrections).returns,
    )
