"""Kernels in 8 or 4 bits: codes and float32 scales instead of floats, for weights that stay as they are (QLoRA).

int8: a scale for each output, so that the largest of its weights is at the end of the range. nf4: a scale for each tile
of weights along the model dim, the largest of them; a code names one of 16 quantiles of the normal distribution. Qwix
finds and undoes the codes on any backend; what lies where, and that two codes of 4 bits share a byte, is decided here.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, UInt8, UInt32

from app.mesh.axis_rules import on_each_device
from app.records.versions import NOT_INSTALLED, QUANTIZING, lower_bounds, release, version_of
from settings.errors import InputError
from settings.schema.lora import Quantization

CODES, SCALES = "codes", "scales"
"""Leaf names of what stands where another network has a `kernel`."""

TILED = "embed"
"""Every kernel has it, and tp never splits it."""
MAX_TILE = 64
"""Weights that share a scale, as in the paper."""
MIN_TILE = 16
"""With fewer, scales take more than half of what the codes do."""

QUANTIZE_BASE = "model.lora.quantize_base"


@dataclass(frozen=True, slots=True)
class QuantizedKernel:
    """How a kernel of one layer is held."""

    quantization: Quantization
    dims: tuple[str, ...]
    """Logical dims of the kernel, and of its codes."""
    scale_dims: tuple[str, ...]
    """Those of them that its scales have, too."""

    @classmethod
    def of(cls, quantization: Quantization, *, inputs: Sequence[str], outputs: Sequence[str]) -> QuantizedKernel:
        dims = (*inputs, *outputs)
        return cls(quantization, dims, tuple(outputs) if quantization == "int8" else dims)

    @property
    def code_type(self) -> Any:
        return jnp.int8 if self.quantization == "int8" else jnp.uint8

    def code_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Of an array of codes, by dim, for a kernel of these sizes."""
        packed = {TILED: sizes[TILED] // 2} if self.quantization == "nf4" else {}
        return {dim: sizes[dim] for dim in self.dims} | packed

    def scale_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Of an array of scales."""
        tiles = {TILED: sizes[TILED] // tile_of(sizes[TILED])} if self.quantization == "nf4" else {}
        return {dim: sizes[dim] for dim in self.scale_dims} | tiles

    def quantized(self, kernel: Float32[np.ndarray, "*dims"]) -> dict[str, np.ndarray]:
        """Codes and scales, found on one device of this host: the same on any mesh."""
        return jax.tree.map(np.asarray, _quantized(self, kernel))

    def dequantized(
        self,
        codes: Int[Array, "*codes"] | UInt8[Array, "*codes"],
        scales: Float32[Array, "*scales"],
        *,
        after: Float[Array, "R T *inputs"],
    ) -> Float32[Array, "*dims"]:
        """The kernel that they stand for, whole along its model dim on every device.

        Codes, not floats, are what is gathered along fsdp; nothing else moves. No gradient passes.

        Args:
            after: what is multiplied with it, and so must be there before it is made.
        """
        codes_lie, scales_lie = map(_gathered, (self.dims, self.scale_dims))
        after_lies = ("rows", "tokens", *codes_lie[: after.ndim - 2])
        undo = on_each_device(
            functools.partial(_dequantized, self), inputs=(codes_lie, scales_lie, after_lies), outputs=(codes_lie,)
        )
        return undo(codes, scales, jax.lax.stop_gradient(after))[0]


def _gathered(dims: Sequence[str]) -> tuple[str, ...]:
    return tuple("activation" if dim == TILED else dim for dim in dims)


def tile_of(model_dim: int) -> int:
    """Weights along the model dim that share a scale."""
    return math.gcd(model_dim, MAX_TILE)


def check_quantization(quantization: Quantization, *, model_dim: int) -> None:
    """Raises InputError where no tiles fit the model."""
    if quantization == "nf4" and tile_of(model_dim) < MIN_TILE:
        raise InputError(
            f"{QUANTIZE_BASE}: nf4 holds a scale for each tile of {MIN_TILE} to {MAX_TILE} weights, a power of two "
            f"that divides the model's width, which is {model_dim}; set it to int8 or null"
        )


def check_is_installed() -> None:
    """Raises InputError where Qwix is not there, or is older than what the program was tested with."""
    found, oldest = version_of(QUANTIZING), lower_bounds("qlora")[QUANTIZING]
    if found == NOT_INSTALLED or release(found) < release(oldest):
        there = "" if found == NOT_INSTALLED else f", and {QUANTIZING} {found} is older than {oldest}"
        raise InputError(
            f"{QUANTIZE_BASE} needs an optional package{there}; pip install 'grpo[qlora]', or set it to null"
        )


@functools.partial(jax.jit, static_argnums=0)
def _quantized(how: QuantizedKernel, kernel: Array) -> dict[str, Array]:
    import qwix

    by_dim = dict(zip(how.dims, kernel.shape, strict=True))
    tiles = {how.dims.index(TILED): tile_of(by_dim[TILED])} if how.quantization == "nf4" else {}
    alone = [axis for axis, dim in enumerate(how.dims) if dim in how.scale_dims and axis not in tiles]
    found = qwix.quantize(kernel, how.quantization, channelwise_axes=alone, tiled_axes=tiles)
    codes = _packed(found.qvalue, how.dims.index(TILED)) if how.quantization == "nf4" else found.qvalue
    return {CODES: codes, SCALES: found.scale.reshape(tuple(how.scale_sizes(by_dim).values()))}


def _dequantized(how: QuantizedKernel, codes: Array, scales: Array, after: Array) -> tuple[Array]:
    import qwix

    codes = codes ^ _zero_after(after).astype(codes.dtype)
    shape = iter(scales.shape)
    scales = scales.reshape([next(shape) if dim in how.scale_dims else 1 for dim in how.dims])
    if how.quantization == "nf4":
        codes = _unpacked(codes, how.dims.index(TILED))
    return (qwix.dequantize(qwix.QArray(codes, scales, qtype=how.quantization)),)


def _zero_after(x: Array) -> UInt32[Array, ""]:
    """A zero that is not known before `x` is.

    Codes do not depend on it, and where layers are not a loop XLA's scheduler for CPUs would begin with the kernels of
    all of them, and hold them. An `optimization_barrier` is gone by the time it runs. Other schedulers are not known to
    need it.
    """
    first = x[(0,) * x.ndim].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(first, jnp.uint32) >> 31 >> 1


def _packed(codes: Array, axis: int) -> UInt8[Array, "*dims"]:
    """Neighbours along an axis in one byte, the first in its lower half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    low, high = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in range(2))
    return low | high << 4


def _unpacked(codes: UInt8[Array, "*dims"], axis: int) -> UInt8[Array, "*dims"]:
    """The inverse of `_packed`, a code in each byte."""
    halves = jnp.stack([codes & 15, codes >> 4], axis + 1)
    return halves.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])
