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

from app.mesh.axis_rules import shard_map_by_dims
from app.records.versions import NOT_INSTALLED, QUANTIZATION_PACKAGE, minimum_versions, parse_release, version_of
from settings.errors import InputError
from settings.schema.lora import Quantization

CODES, SCALES = "codes", "scales"
"""Leaf names of what stands where another network has a `kernel`."""

TILED_DIM = "embed"
"""Every kernel has it, and tp never splits it."""
MAX_TILE = 64
"""Weights that share a scale, as in the paper."""
MIN_TILE = 16
"""With fewer, scales take more than half of what the codes do."""

QUANTIZE_BASE_SETTING = "model.lora.quantize_base"


@dataclass(frozen=True, slots=True)
class KernelQuantizer:
    """How a kernel of one layer is held."""

    quantization: Quantization
    dims: tuple[str, ...]
    """Logical dims of the kernel, and of its codes."""
    scale_dims: tuple[str, ...]
    """Those of them that its scales have, too."""

    @classmethod
    def create(cls, quantization: Quantization, *, inputs: Sequence[str], outputs: Sequence[str]) -> KernelQuantizer:
        dims = (*inputs, *outputs)
        return cls(quantization, dims, tuple(outputs) if quantization == "int8" else dims)

    @property
    def code_dtype(self) -> Any:
        return jnp.int8 if self.quantization == "int8" else jnp.uint8

    def code_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Of an array of codes, by dim, for a kernel of these sizes."""
        packed = {TILED_DIM: sizes[TILED_DIM] // 2} if self.quantization == "nf4" else {}
        return {dim: sizes[dim] for dim in self.dims} | packed

    def scale_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Of an array of scales."""
        tiles = {TILED_DIM: sizes[TILED_DIM] // tile_size(sizes[TILED_DIM])} if self.quantization == "nf4" else {}
        return {dim: sizes[dim] for dim in self.scale_dims} | tiles

    def quantize(self, kernel: Float32[np.ndarray, "*dims"]) -> dict[str, np.ndarray]:
        """Codes and scales, found on one device of this host: the same on any mesh."""
        return jax.tree.map(np.asarray, _quantize(self, kernel))

    def dequantize(
        self,
        codes: Int[Array, "*codes"] | UInt8[Array, "*codes"],
        scales: Float32[Array, "*scales"],
        *,
        depends_on: Float[Array, "R T *inputs"],
    ) -> Float32[Array, "*dims"]:
        """The kernel that they stand for, whole along its model dim on every device.

        Codes, not floats, are what is gathered along fsdp; nothing else moves. No gradient passes.

        Args:
            after: what is multiplied with it, and so must be there before it is made.
        """
        codes_lie, scales_lie = map(_gathered_dims, (self.dims, self.scale_dims))
        after_lies = ("rows", "tokens", *codes_lie[: depends_on.ndim - 2])
        undo = shard_map_by_dims(
            functools.partial(_dequantize, self), in_dims=(codes_lie, scales_lie, after_lies), out_dims=(codes_lie,)
        )
        return undo(codes, scales, jax.lax.stop_gradient(depends_on))[0]


def _gathered_dims(dims: Sequence[str]) -> tuple[str, ...]:
    return tuple("activation" if dim == TILED_DIM else dim for dim in dims)


def tile_size(model_dim: int) -> int:
    """Weights along the model dim that share a scale."""
    return math.gcd(model_dim, MAX_TILE)


def check_quantization(quantization: Quantization, *, model_dim: int) -> None:
    """Raises InputError where no tiles fit the model."""
    if quantization == "nf4" and tile_size(model_dim) < MIN_TILE:
        raise InputError(
            f"{QUANTIZE_BASE_SETTING}: nf4 holds a scale for each tile of {MIN_TILE} to {MAX_TILE} weights, a power "
            f"of two "
            f"that divides the model's width, which is {model_dim}; set it to int8 or null"
        )


def check_qwix_installed() -> None:
    """Raises InputError where Qwix is not there, or is older than what the program was tested with."""
    found, oldest = version_of(QUANTIZATION_PACKAGE), minimum_versions("qlora")[QUANTIZATION_PACKAGE]
    if found == NOT_INSTALLED or parse_release(found) < parse_release(oldest):
        there = "" if found == NOT_INSTALLED else f", and {QUANTIZATION_PACKAGE} {found} is older than {oldest}"
        raise InputError(
            f"{QUANTIZE_BASE_SETTING} needs an optional package{there}; pip install -e '.[qlora]', or set it to null"
        )


@functools.partial(jax.jit, static_argnums=0)
def _quantize(quantizer: KernelQuantizer, kernel: Array) -> dict[str, Array]:
    import qwix

    by_dim = dict(zip(quantizer.dims, kernel.shape, strict=True))
    tiles = {quantizer.dims.index(TILED_DIM): tile_size(by_dim[TILED_DIM])} if quantizer.quantization == "nf4" else {}
    alone = [axis for axis, dim in enumerate(quantizer.dims) if dim in quantizer.scale_dims and axis not in tiles]
    found = qwix.quantize(kernel, quantizer.quantization, channelwise_axes=alone, tiled_axes=tiles)
    codes = (
        _pack_4bit(found.qvalue, quantizer.dims.index(TILED_DIM)) if quantizer.quantization == "nf4" else found.qvalue
    )
    return {CODES: codes, SCALES: found.scale.reshape(tuple(quantizer.scale_sizes(by_dim).values()))}


def _dequantize(quantizer: KernelQuantizer, codes: Array, scales: Array, depends_on: Array) -> tuple[Array]:
    import qwix

    codes = codes ^ _zero_depending_on(depends_on).astype(codes.dtype)
    shape = iter(scales.shape)
    scales = scales.reshape([next(shape) if dim in quantizer.scale_dims else 1 for dim in quantizer.dims])
    if quantizer.quantization == "nf4":
        codes = _unpack_4bit(codes, quantizer.dims.index(TILED_DIM))
    return (qwix.dequantize(qwix.QArray(codes, scales, qtype=quantizer.quantization)),)


def _zero_depending_on(x: Array) -> UInt32[Array, ""]:
    """A zero that is not known before `x` is.

    Codes do not depend on it, and where layers are not a loop XLA's scheduler for CPUs would begin with the kernels of
    all of them, and hold them. An `optimization_barrier` is gone by the time it runs. Other schedulers are not known to
    need it.
    """
    first = x[(0,) * x.ndim].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(first, jnp.uint32) >> 31 >> 1


def _pack_4bit(codes: Array, axis: int) -> UInt8[Array, "*dims"]:
    """Neighbours along an axis in one byte, the first in its lower half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    low, high = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in range(2))
    return low | high << 4


def _unpack_4bit(codes: UInt8[Array, "*dims"], axis: int) -> UInt8[Array, "*dims"]:
    """The inverse of `_packed`, a code in each byte."""
    halves = jnp.stack([codes & 15, codes >> 4], axis + 1)
    return halves.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])
