"""Which backend `auto` takes."""

from __future__ import annotations

from typing import NamedTuple

import jax

from app.advantage.gae.chunked import CHUNK_SIZE


class Choice(NamedTuple):
    backend: str
    chunk_size: int
    why: str
    on_host: bool = False
    """By `app.advantage.gae.fused.fused_plain`."""


def choose(
    backend: str,
    shape: tuple[int, ...],
    *,
    per_token_decay: bool,
    chunk_size: int | None = None,
    traced: bool = False,
) -> Choice:
    """The backend that was asked for, or for `auto` the one that is fastest here.

    Args:
        backend: a name of `app.advantage.gae.estimate.BACKENDS`, or `auto`.
        shape: of the rewards, [B, T].
        per_token_decay: there are masks, ends, or gammas or lambdas of each token.
        chunk_size: steps of a chunk; None = what suits the backend.
        traced: the arrays are those of a program that is being compiled, not numbers.
    """
    size = chunk_size or CHUNK_SIZE
    plain_on_cpu = jax.default_backend() == "cpu" and not per_token_decay and not traced
    if backend != "auto":
        return Choice(backend, size, "asked for", on_host=backend == "fused" and plain_on_cpu)
    # Milliseconds, medians of one run in turn on 2 cores of an AMD EPYC that other programs shared (load 5, so that
    # all are slower than alone); from numpy to numpy, compiled before. numpy is a loop over time-major rows.
    #   shape          numpy  chunked by 64  fused
    #   (1, 131072)      307            0.6    1.2
    #   (16, 8192)        16            4.7    0.7
    #   (128, 65536)     210            172     80
    #   (256, 131072)    568            495    268
    if plain_on_cpu and shape[0] > 1:
        return Choice("fused", size, "one decay on a CPU: about twice as fast there as the chunk scan", on_host=True)
    if plain_on_cpu:
        return Choice("chunked", chunk_size or 64, "one row on a CPU: the chunk scan is twice as fast there as fused")
    if jax.default_backend() == "cpu":
        return Choice("chunked", size, "a decay of each token, or a part of a compiled program: fused is chunked there")
    return Choice("chunked", size, "the kernel of fused has not been timed on a device of this kind")
