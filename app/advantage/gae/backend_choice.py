"""Which backend computes an estimate."""

from __future__ import annotations

from typing import NamedTuple

import jax

from app.advantage.gae.chunked import CHUNK_SIZE

REQUESTED = "asked for"
MIN_FUSED_TOKENS = 256


class BackendChoice(NamedTuple):
    backend: str
    """What runs, which need not be what was asked for."""
    chunk_size: int | None
    """None where the backend has no chunks of a size that can be asked for."""
    reason: str
    on_host: bool = False
    """By `app.advantage.gae.fused.fused_plain`."""


def choose_backend(
    backend: str,
    shape: tuple[int, ...],
    *,
    constant_decay: bool,
    chunk_size: int | None = None,
    traced: bool = False,
) -> BackendChoice:
    """The backend that was asked for where it can do it, or for `auto` the one that is fastest here.

    Args:
        backend: a name of `app.advantage.gae.estimate.BACKENDS`, or `auto`.
        shape: of the rewards, [B, T].
        one_leak: one gamma and one lambda for all tokens, no mask, and one sequence a row.
        chunk_size: steps of a chunk; None = what suits the backend.
        traced: the arrays are those of a program that is being compiled, not numbers.
    """
    if backend == "serial":
        return BackendChoice("serial", None, REQUESTED)
    chunks = BackendChoice("chunked", chunk_size or CHUNK_SIZE, REQUESTED)
    if backend == "chunked":
        return chunks
    on_cpu = jax.default_backend() == "cpu"
    if not constant_decay and on_cpu and backend == "auto":
        # Milliseconds as below, with a mask: a scan of pairs is several times the arithmetic, which few cores notice.
        #   shape          serial  chunked by 16  by 64
        #   (1, 131072)       2.0            1.9    2.0
        #   (16, 8192)        1.9            1.9    2.1
        #   (64, 65536)        85            115    175
        #   (4096, 256)        18             18     33
        return BackendChoice("serial", None, "masks, or several sequences in a row, on a CPU")
    if not constant_decay:
        return chunks._replace(reason="masks, or several sequences in a row: fused has no form for them")
    if 0 in shape or (on_cpu and traced):
        return chunks._replace(reason="no tokens" if 0 in shape else "part of a compiled program")
    if backend == "fused":
        return BackendChoice("fused", None, REQUESTED, on_host=on_cpu)
    if not on_cpu:
        return chunks._replace(reason="fused has not been timed on a device of this kind")
    # Milliseconds, the best of 24 in turn on 2 busy cores of an AMD EPYC; from numpy to numpy, compiled before.
    #   shape          serial  chunked by 64  fused
    #   (1, 131072)      1.69           0.79   0.56
    #   (16, 8192)       1.38           0.50   0.39
    #   (512, 4096)      12.0            5.4    4.6
    #   (4096, 256)       5.5            3.5    3.3
    #   (8192, 64)        2.6            1.2    2.7
    #   (65536, 8)        1.8            0.7    5.8
    if shape[1] < MIN_FUSED_TOKENS:
        return BackendChoice("chunked", chunk_size or 64, "short rows, on a CPU")
    return BackendChoice("fused", None, "one sequence a row, on a CPU", on_host=True)
