"""Generalized advantage estimation: rewards and values in, advantages and returns out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import numpy as np

from app.advantage.gae.backend_choice import choose_backend
from app.advantage.gae.chunked import solve_chunked
from app.advantage.gae.fused import solve_fused
from app.advantage.gae.recurrence import (
    MASK_MODES,
    Discounts,
    GaeOutput,
    GaeRows,
    HostOrDevice,
    Number,
    RecurrenceTerms,
    make_gae_rows,
)
from app.advantage.gae.serial import solve_serial

SOLVERS: Mapping[str, Callable[..., GaeOutput]] = MappingProxyType({"serial": solve_serial, "chunked": solve_chunked})
"""(terms, and `chunk_size` if the backend has chunks) -> advantages and returns, in JAX."""
BACKENDS = (*SOLVERS, "fused")
"""`fused` takes whole rows instead of terms, in numpy."""


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

    All arithmetic is float32, whatever the input. Backends in JAX trace `gamma` and `lam`: new values do not recompile.
    Pass values close to 1 as Python numbers or float64; see `Discounts`.

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
        chunk_size: steps per chunk of `chunked`, at least 1; None = its default.

    Raises:
        ValueError: the backend does not support the discounts.

    Source: Schulman et al. 2016, eq. 16.
    """
    choice = choose_backend(backend, one_decay=np.ndim(gamma) == np.ndim(lam) == 0, chunk_size=chunk_size)
    given = {"mask": mask, "ends": ends, "bootstrap": bootstrap}
    if choice.backend == "fused":
        return solve_fused(rewards, values, gamma=float(gamma), lam=float(lam), mask_mode=mask_mode, **given)
    rows = make_gae_rows(rewards, values, **given)
    return _estimate(rows, Discounts.create(gamma, lam), mask_mode, choice.backend, choice.chunk_size)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _estimate(rows: GaeRows, discounts: Discounts, mask_mode: str, backend: str, chunk_size: int | None) -> GaeOutput:
    return solve_recurrence(MASK_MODES[mask_mode](rows, discounts), backend, chunk_size)


def solve_recurrence(terms: RecurrenceTerms, backend: str, chunk_size: int | None) -> GaeOutput:
    """Solves the recurrence with one of `SOLVERS`; `chunk_size` is None if that backend has no chunks."""
    return SOLVERS[backend](terms, **({} if chunk_size is None else {"chunk_size": chunk_size}))
