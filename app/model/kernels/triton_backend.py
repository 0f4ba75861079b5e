"""Checks whether this JAX compiles our GPU kernels; JAX 0.11 has announced the end of their Triton backend."""

from __future__ import annotations

import functools
import importlib
import logging

import jax

_log = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Returns whether Pallas has its Triton backend; if not, logs once what runs instead."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        _log.warning(
            "JAX %s does not compile this program's GPU kernels (%s): XLA computes attention, decoding and the "
            "experts' matmuls instead, which is slower; install an earlier JAX to use the kernels",
            jax.__version__,
            error,
        )
        return False
    return True
