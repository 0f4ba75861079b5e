"""Generalized advantage estimation: rewards and values in, advantages and returns out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import numpy as np
from jax.core import Tracer

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.chunked import solve_chunked
from app.advantage.gae.fused import fused_gae_on_host, solve_fused
from app.advantage.gae.recurrence import (
    MASK_MODES,
    Discounts,
    GaeOutput,
    HostOrDevice,
    Number,
    RecurrenceTerms,
    make_gae_rows,
    values_after_rows,
)
from app.advantage.gae.serial import solve_serial

BACKENDS: Mapping[str, Callable[..., GaeOutput]] = MappingProxyType(
    {"serial": solve_serial, "chunked": solve_chunked, "fused": solve_fused}
)
"""(terms, and `chunk_size` if the backend has chunks) -> advantages and returns; `backend_choice` selects one."""


def generalized_advantages(
    rewards: HostOrDevice,
    values: HostOrDevice,
    *,
    gamma: Number,
    lam: Number,
    mask: HostOrDevice | None = None,
    ends: HostOrDevice | None = None,
    bootstrap: HostOrDevice | None = None,
    mask_mode: str = "skip",
    backend: str = "auto",
    chunk_size: int | None = None,
) -> GaeOutput:
    """Computes A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, and the returns A + V.

    All arithmetic is float32, whatever the input. `gamma` and `lam` are traced: new values do not recompile. Pass
    values close to 1 as Python numbers or float64; see `Discounts`.

    Args:
        rewards: [B, T].
        values: [B, T], or [B, T+1] whose last column is the value after the row; see `values_after_rows`.
        gamma: a number or one per token, in [0, 1]; 0 marks a terminal step.
        lam: a number or one per token, in [0, 1].
        mask: [B, T], True on tokens that the policy wrote; None = all.
        ends: [B, T], True on the last token of each sequence of a row; the row's last token always ends one.
        bootstrap: [B, T], the value after a sequence, read at its last token; None = 0: all sequences are complete.
        mask_mode: meaning of masked tokens, see `app.advantage.gae.recurrence`.
        backend: one of `BACKENDS`, or `auto`, see `app.advantage.gae.backend_choice`.
        chunk_size: steps per chunk, at least 1; None = the backend's default.

    Source: Schulman et al. 2016, eq. 16.
    """
    constant_decay = mask is None and ends is None and np.ndim(gamma) == np.ndim(lam) == 0
    traced = any(isinstance(x, Tracer) for x in (rewards, values, gamma, lam, bootstrap))
    choice = choose_backend(backend, rewards.shape, constant_decay=constant_decay, chunk_size=chunk_size, traced=traced)
    if choice.on_host:
        last_values = values_after_rows(values, rewards.shape[1], bootstrap)
        return fused_gae_on_host(rewards, values[:, : rewards.shape[1]], last_values, float(gamma), float(lam))
    by = Discounts.create(gamma, lam)
    return _estimate(rewards, values, by, mask, ends, bootstrap, mask_mode, choice.backend, choice.chunk_size)


@functools.partial(jax.jit, static_argnums=(6, 7, 8))
def _estimate(
    rewards: HostOrDevice,
    values: HostOrDevice,
    discounts: Discounts,
    mask: HostOrDevice | None,
    ends: HostOrDevice | None,
    bootstrap: HostOrDevice | None,
    mask_mode: str,
    backend: str,
    chunk_size: int | None,
) -> GaeOutput:
    rows = make_gae_rows(rewards, values, mask=mask, ends=ends, bootstrap=bootstrap)
    return solve_recurrence(MASK_MODES[mask_mode](rows, discounts), backend, chunk_size)


def solve_recurrence(terms: RecurrenceTerms, backend: str, chunk_size: int | None) -> GaeOutput:
    """Solves the recurrence with one of `BACKENDS`; `chunk_size` is None if that backend has no chunks."""
    return BACKENDS[backend](terms, **({} if chunk_size is None else {"chunk_size": chunk_size}))
