"""Frozen kernels in 8 or 4 bits (QLoRA): codes and float32 scales instead of floats.

int8 has one scale per output, which maps the output's largest weight to the end of the range. nf4 has one scale per
tile of weights along the model dim: the tile's largest weight. Its codes stand for 16 quantiles of the normal
distribution. Qwix quantizes and dequantizes on any backend; this module defines the layout and packs 4-bit codes.

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
"""Leaf names of a quantized kernel, in place of `kernel`."""

TILED_DIM = "embed"
"""The dim that nf4 splits into tiles: every kernel has it, and tp never splits it."""
MAX_TILE = 64
"""The largest number of weights that share a scale, as in the paper."""
MIN_TILE = 16
"""The smallest such number: with fewer, the scales would take more than half as much memory as the codes."""

QUANTIZE_BASE_SETTING = "model.lora.quantize_base"


@dataclass(frozen=True, slots=True)
class KernelQuantizer:
    """The layout of a quantized kernel of one layer."""

    quantization: Quantization
    dims: tuple[str, ...]
    """Logical dims of the kernel and of its codes."""
    scale_dims: tuple[str, ...]
    """Logical dims of the scales, a subset of `dims`."""

    @classmethod
    def create(cls, quantization: Quantization, *, inputs: Sequence[str], outputs: Sequence[str]) -> KernelQuantizer:
        dims = (*inputs, *outputs)
        return cls(quantization, dims, tuple(outputs) if quantization == "int8" else dims)

    @property
    def code_dtype(self) -> Any:
        return jnp.int8 if self.quantization == "int8" else jnp.uint8

    def code_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the codes by dim, for a kernel of these sizes."""
        packed = {TILED_DIM: sizes[TILED_DIM] // 2} if self.quantization == "nf4" else {}
        return {dim: sizes[dim] for dim in self.dims} | packed

    def scale_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Returns the sizes of the scales by dim, for a kernel of these sizes."""
        tiles = {TILED_DIM: sizes[TILED_DIM] // tile_size(sizes[TILED_DIM])} if self.quantization == "nf4" else {}
        return {dim: sizes[dim] for dim in self.scale_dims} | tiles

    def quantize(self, kernel: Float32[np.ndarray, "*dims"]) -> dict[str, np.ndarray]:
        """Returns codes and scales, computed on one device of this host, so that they do not depend on the mesh."""
        return jax.tree.map(np.asarray, _quantize(self, kernel))

    def dequantize(
        self,
        codes: Int[Array, "*codes"] | UInt8[Array, "*codes"],
        scales: Float32[Array, "*scales"],
        *,
        depends_on: Float[Array, "R T *inputs"],
    ) -> Float32[Array, "*dims"]:
        """Returns the kernel as float32, gathered along its model dim on every device.

        Codes and scales are gathered over fsdp, not the float kernel. No gradient passes through.

        Args:
            depends_on: the other factor of the product; the kernel is dequantized only after this is computed.
        """
        code_dims, scale_dims = (
            tuple("activation" if dim == TILED_DIM else dim for dim in dims) for dims in (self.dims, self.scale_dims)
        )
        x_dims = ("rows", "tokens", *code_dims[: depends_on.ndim - 2])
        dequantize = shard_map_by_dims(
            functools.partial(_dequantize, self), in_dims=(code_dims, scale_dims, x_dims), out_dims=(code_dims,)
        )
        return dequantize(codes, scales, jax.lax.stop_gradient(depends_on))[0]


def tile_size(model_dim: int) -> int:
    """Returns the number of weights along the model dim that share a scale."""
    return math.gcd(model_dim, MAX_TILE)


def check_quantization(quantization: Quantization, *, model_dim: int) -> None:
    """Raises InputError if no tile size fits the model."""
    if quantization == "nf4" and tile_size(model_dim) < MIN_TILE:
        raise InputError(
            f"{QUANTIZE_BASE_SETTING}: nf4 needs a model width divisible by {MIN_TILE}, got {model_dim}; "
            "set it to int8 or null"
        )


def check_qwix_installed() -> None:
    """Raises InputError if Qwix is not installed, or is older than the lowest tested version."""
    installed, oldest = version_of(QUANTIZATION_PACKAGE), minimum_versions("qlora")[QUANTIZATION_PACKAGE]
    if installed == NOT_INSTALLED or parse_release(installed) < parse_release(oldest):
        found = "it is not installed" if installed == NOT_INSTALLED else f"version {installed} is installed"
        raise InputError(
            f"{QUANTIZE_BASE_SETTING} needs {QUANTIZATION_PACKAGE} {oldest} or later, but {found}; run "
            "pip install -e '.[qlora]', or set it to null"
        )


@functools.partial(jax.jit, static_argnums=0)
def _quantize(quantizer: KernelQuantizer, kernel: Array) -> dict[str, Array]:
    import qwix

    by_dim = dict(zip(quantizer.dims, kernel.shape, strict=True))
    tiles = {quantizer.dims.index(TILED_DIM): tile_size(by_dim[TILED_DIM])} if quantizer.quantization == "nf4" else {}
    channelwise = [axis for axis, dim in enumerate(quantizer.dims) if dim in quantizer.scale_dims and axis not in tiles]
    quantized = qwix.quantize(kernel, quantizer.quantization, channelwise_axes=channelwise, tiled_axes=tiles)
    codes = quantized.qvalue
    if quantizer.quantization == "nf4":
        codes = _pack_4bit(codes, quantizer.dims.index(TILED_DIM))
    return {CODES: codes, SCALES: quantized.scale.reshape(tuple(quantizer.scale_sizes(by_dim).values()))}


def _dequantize(quantizer: KernelQuantizer, codes: Array, scales: Array, depends_on: Array) -> tuple[Array]:
    import qwix

    codes = codes ^ _zero_depending_on(depends_on).astype(codes.dtype)
    shape = iter(scales.shape)
    scales = scales.reshape([next(shape) if dim in quantizer.scale_dims else 1 for dim in quantizer.dims])
    if quantizer.quantization == "nf4":
        codes = _unpack_4bit(codes, quantizer.dims.index(TILED_DIM))
    return (qwix.dequantize(qwix.QArray(codes, scales, qtype=quantizer.quantization)),)


def _zero_depending_on(x: Array) -> UInt32[Array, ""]:
    """Returns a zero that depends on `x`.

    Without it, codes would not depend on `x`, and with unrolled layers XLA's CPU scheduler would dequantize all kernels
    first and keep them. An `optimization_barrier` does not help: XLA removes it before scheduling. Other schedulers are
    not known to need this.
    """
    first = x[(0,) * x.ndim].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(first, jnp.uint32) >> 31 >> 1


def _pack_4bit(codes: Array, axis: int) -> UInt8[Array, "*dims"]:
    """Packs adjacent pairs along an axis into one byte each, the first of a pair into the lower half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    low, high = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in range(2))
    return low | high << 4


def _unpack_4bit(codes: UInt8[Array, "*dims"], axis: int) -> UInt8[Array, "*dims"]:
    """Unpacks the result of `_pack_4bit` into one byte per code."""
    halves = jnp.stack([codes & 15, codes >> 4], axis + 1)
    return halves.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])
