"""Whether this JAX compiles our kernels for GPUs, whose backend it has announced to end (JAX 0.11)."""

from __future__ import annotations

import functools
import importlib
import logging

import jax

_log = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Returns whether Pallas has its Triton backend; says once what runs instead if it has not."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        _log.warning(
            "JAX %s does not compile this program's kernels for GPUs (%s): XLA computes attention, decoding and the "
            "products of experts instead, which is slower; install an earlier JAX to use the kernels",
            jax.__version__,
            error,
        )
        return False
    return True
