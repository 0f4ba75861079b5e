"""Choice of the GAE backend."""

from __future__ import annotations

from typing import NamedTuple

from app.advantage.gae.chunked import CHUNK_SIZE
from app.mesh.axis_rules import current_device

REQUESTED = "requested"
MIN_FUSED_TOKENS = 256


class BackendChoice(NamedTuple):
    backend: str
    """Backend to run, which may differ from the requested one."""
    chunk_size: int | None
    """Steps per chunk; None if the backend has no configurable chunks."""
    reason: str
    on_host: bool = False
    """True if `app.advantage.gae.fused.fused_gae_on_host` computes it."""


def choose_backend(
    backend: str,
    shape: tuple[int, ...],
    *,
    constant_decay: bool,
    chunk_size: int | None = None,
    traced: bool = False,
) -> BackendChoice:
    """Returns the requested backend, `chunked` if that one does not support the case, or for `auto` the fastest.

    Args:
        backend: a name of `app.advantage.gae.estimate.BACKENDS`, or `auto`.
        shape: shape of the rewards, [B, T].
        constant_decay: whether all tokens have the same gamma and lambda, without a mask, and each row is one sequence.
        chunk_size: steps per chunk; None = the backend's default.
        traced: whether the arrays are tracers of a program that is being compiled.
    """
    if backend == "serial":
        return BackendChoice("serial", None, REQUESTED)
    chunks = BackendChoice("chunked", chunk_size or CHUNK_SIZE, REQUESTED)
    if backend == "chunked":
        return chunks
    on_cpu = current_device()[0] == "cpu"
    if not constant_decay and on_cpu and backend == "auto":
        # Milliseconds, measured as below but with a mask: a scan over pairs needs several times the arithmetic.
        #   shape          serial  chunked by 16  by 64
        #   (1, 131072)       2.0            1.9    2.0
        #   (16, 8192)        1.9            1.9    2.1
        #   (64, 65536)        85            115    175
        #   (4096, 256)        18             18     33
        return BackendChoice("serial", None, "masks, per-token discounts or several sequences per row, on a CPU")
    if not constant_decay:
        return chunks._replace(reason="fused supports no masks, per-token discounts or several sequences per row")
    if 0 in shape or (on_cpu and traced):
        return chunks._replace(reason="no tokens" if 0 in shape else "part of a compiled program")
    if backend == "fused":
        return BackendChoice("fused", None, REQUESTED, on_host=on_cpu)
    if not on_cpu:
        return chunks._replace(reason="fused has not been benchmarked on this kind of device")
    # Milliseconds, best of 24 alternating runs on 2 busy cores of an AMD EPYC; numpy in and out, without compilation.
    #   shape          serial  chunked by 64  fused
    #   (1, 131072)      1.69           0.79   0.56
    #   (16, 8192)       1.38           0.50   0.39
    #   (512, 4096)      12.0            5.4    4.6
    #   (4096, 256)       5.5            3.5    3.3
    #   (8192, 64)        2.6            1.2    2.7
    #   (65536, 8)        1.8            0.7    5.8
    if shape[1] < MIN_FUSED_TOKENS:
        return BackendChoice("chunked", chunk_size or 64, "short rows, on a CPU")
    return BackendChoice("fused", None, "one sequence per row, on a CPU", on_host=True)
