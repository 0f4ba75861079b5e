"""Checks whether this JAX can compile our GPU kernels; JAX 0.11 announces the removal of Pallas' Triton backend."""

from __future__ import annotations

import functools
import importlib
import logging

import jax

_log = logging.getLogger(__name__)


@functools.cache
def has_triton() -> bool:
    """Returns whether Pallas has a Triton backend; if not, logs once what runs instead of the kernels."""
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
