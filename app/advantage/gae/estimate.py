"""Generalized advantage estimation: rewards and values in, advantages and returns out."""

from __future__ import annotations

from app.advantage.gae.chunked import CHUNK_SIZE, solve_chunked
from app.advantage.gae.numpy_scan import solve_in_numpy
from app.advantage.gae.recurrence import Discounts, HostOrDevice, Number, TokenAdvantages, make_gae_rows

BACKENDS = ("numpy", "chunked")
"""`numpy` runs a chunk scan in blocks on the host, `chunked` a chunk scan in JAX on the device.

Training and `grpo gae` have their arrays in host memory and need the results there, so `numpy` is faster for them;
`grpo gae --bench` measures both.
"""


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
    backend: str = "numpy",
    chunk_size: int | None = None,
) -> TokenAdvantages:
    """Computes A_t = delta_t + gamma lambda A_{t+1}, delta_t = r_t + gamma V_{t+1} - V_t, and the returns A + V.

    The result is always float32. `chunked` traces `gamma` and `lam`, so new values do not recompile. Pass values close
    to 1 as Python numbers or float64; see `Discounts`.

    Args:
        rewards: [B, T].
        values: [B, T], or [B, T+1] whose last column is the value after the row; see `values_after_rows`.
        gamma: one number, or one per token, in [0, 1]; 0 marks a terminal step.
        lam: one number, or one per token, in [0, 1].
        mask: [B, T], True on tokens that the policy wrote; None = all.
        ends: [B, T], True on the last token of each sequence in a row; a row's last token always ends a sequence.
        bootstrap: [B, T], the value after a sequence, read at its last token; None = 0, as after complete sequences.
        mask_mode: meaning of masked tokens, see `app.advantage.gae.recurrence`.
        backend: one of `BACKENDS`.
        chunk_size: steps per chunk of `chunked`, at least 1; None = its default.

    Source: Schulman et al. 2016, eq. 16.
    """
    given = {"mask": mask, "ends": ends, "bootstrap": bootstrap}
    if backend == "numpy":
        return solve_in_numpy(rewards, values, **given, gamma=gamma, lam=lam, mask_mode=mask_mode)
    rows = make_gae_rows(rewards, values, **given)
    return solve_chunked(rows, Discounts.create(gamma, lam), mask_mode, chunk_size or CHUNK_SIZE)
