"""Choice of the GAE backend."""

from __future__ import annotations

from typing import NamedTuple

from app.advantage.gae.chunked import CHUNK_SIZE
from app.mesh.axis_rules import current_device


class BackendChoice(NamedTuple):
    backend: str
    chunk_size: int | None
    """Steps per chunk; None if the backend has no configurable chunks."""
    reason: str


def choose_backend(backend: str, *, one_decay: bool, chunk_size: int | None = None) -> BackendChoice:
    """Returns the requested backend, or for `auto` the one for these discounts.

    Args:
        backend: a name of `app.advantage.gae.estimate.BACKENDS`, or `auto`.
        one_decay: whether gamma and lambda are numbers; masks and ends do not matter.
        chunk_size: steps per chunk of `chunked`; None = the default.

    Raises:
        ValueError: the backend does not support the case.
    """
    if backend == "auto":
        if one_decay:
            # Data comes from the host's memory and goes back there, where `grpo gae --bench` finds it the fastest.
            return BackendChoice("fused", None, "one gamma and lambda")
        if current_device()[0] == "cpu":
            # A scan over pairs needs several times the arithmetic, for which two cores have no time.
            return BackendChoice("serial", None, "discounts per token, on a CPU")
        return BackendChoice("chunked", chunk_size or CHUNK_SIZE, "discounts per token, on a device")
    if backend == "fused" and not one_decay:
        raise ValueError("backend fused: expected one gamma and one lambda, got discounts per token; use auto")
    return BackendChoice(backend, (chunk_size or CHUNK_SIZE) if backend == "chunked" else None, "requested")
