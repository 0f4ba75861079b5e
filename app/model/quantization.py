"""Frozen kernels in 8 or 4 bits (QLoRA): codes and float32 scales instead of floats.

int8 has one scale per output, which maps the output's largest absolute weight to the end of the range. nf4 has one
scale per tile of weights along the model dim: the tile's largest absolute weight. Its codes stand for 16 quantiles of
the normal distribution; Qwix computes the codes on any backend. This module defines the layout, rounds to int8 and
packs 4-bit codes.

Source: Dettmers et al. 2023, "QLoRA: Efficient Finetuning of Quantized LLMs", section 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int, UInt8, UInt32

from app.mesh.axis_rules import current_device, shard_map_by_dims
from app.records.versions import NOT_INSTALLED, QUANTIZATION_PACKAGE, minimum_versions, parse_release, version_of
from settings.errors import InputError
from settings.schema.model import Quantization

CODES, SCALES = "codes", "scales"
"""Leaf names of a quantized kernel, in place of `kernel`."""

INT8_END = 127.5
"""The value to which an output's largest weight is scaled, as in Qwix, so that rounding uses all 256 codes."""
TILED_DIM = "embed"
"""The dim that nf4 splits into tiles; every kernel has it, and tp never splits it."""
MAX_TILE = 64
"""Maximum number of weights per scale, as in the QLoRA paper."""
MIN_TILE = 16
"""Minimum number of weights per scale: with fewer, scales would take more than half the memory of the codes."""

QUANTIZE_BASE_SETTING = "model.lora.quantize_base"


@dataclass(frozen=True, slots=True)
class KernelQuantizer:
    """The layout of a quantized kernel of one layer."""

    quantization: Quantization
    dims: tuple[str, ...]
    """Logical dims of the kernel and of its codes."""
    scale_dims: tuple[str, ...]
    """Logical dims of the scales, a subset of `dims`."""

    def sizes(self, kernel: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Returns the sizes of codes and scales; like `kernel`, both results map logical dims to sizes."""
        codes, scales = ({dim: kernel[dim] for dim in dims} for dims in (self.dims, self.scale_dims))
        if self.quantization == "nf4":
            codes[TILED_DIM] //= 2
            scales[TILED_DIM] //= tile_size(kernel[TILED_DIM])
        return codes, scales

    @functools.partial(jax.jit, static_argnums=0)
    def quantize(self, kernel: Float[Array, "*dims"]) -> dict[str, Array]:
        """Returns codes and scales under their leaf names; the results do not depend on the mesh."""
        if self.quantization == "int8":
            inputs = tuple(axis for axis, dim in enumerate(self.dims) if dim not in self.scale_dims)
            scales = jnp.max(jnp.abs(kernel), axis=inputs) / INT8_END
            scales = jnp.where(scales == 0, 1.0, scales)
            codes = jnp.clip(jnp.round(kernel / scales), -128, 127)
            return {CODES: codes.astype(jnp.int8), SCALES: scales}

        import qwix

        by_dim = dict(zip(self.dims, kernel.shape, strict=True))
        tiled = self.dims.index(TILED_DIM)
        channelwise = [axis for axis in range(len(self.dims)) if axis != tiled]
        tiles = {tiled: tile_size(by_dim[TILED_DIM])}
        quantized = qwix.quantize(kernel, "nf4", channelwise_axes=channelwise, tiled_axes=tiles)
        scales = quantized.scale.reshape(tuple(self.sizes(by_dim)[1].values()))
        return {CODES: _pack_4bit(quantized.qvalue, tiled), SCALES: scales}

    def dequantize(
        self,
        codes: Int[Array, "*codes"] | UInt8[Array, "*codes"],
        scales: Float32[Array, "*scales"],
        *,
        depends_on: Float[Array, "N *inputs"],
    ) -> tuple[Float[Array, "*dims"], Float32[Array, "*outputs"] | None]:
        """Returns a kernel gathered along its model dim on every device, and the factors of the matmul's outputs.

        For int8, the kernel consists of the codes, which are exact in any float dtype, and the factors are the scales.
        Since the codes are only cast, a TPU's matmul reads them directly. For nf4, the kernel is float32 and has no
        factors.

        Codes and scales are gathered over fsdp, not the float kernel. No gradient passes through.

        Args:
            depends_on: the matmul's other factor. The kernel is dequantized only after this is computed, except int8
                on a TPU, where the matmul does it.
        """
        code_dims, scale_dims = (
            tuple("activation" if dim == TILED_DIM else dim for dim in dims) for dims in (self.dims, self.scale_dims)
        )
        x_dims = ("rows", *code_dims[: depends_on.ndim - 1])
        has_factors = self.quantization == "int8"
        dequantize = shard_map_by_dims(
            _codes_and_factors if has_factors else functools.partial(_dequantize_tiles, self),
            in_dims=(code_dims, scale_dims, x_dims),
            out_dims=(code_dims, scale_dims) if has_factors else (code_dims,),
        )
        kernel, *factors = dequantize(codes, *jax.lax.stop_gradient((scales, depends_on)))
        return kernel, factors[0] if has_factors else None


def tile_size(model_dim: int) -> int:
    """Returns the number of weights along the model dim that share an nf4 scale."""
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
            f"pip install -e '.[qlora]', or set {QUANTIZE_BASE_SETTING} to null"
        )


def _codes_and_factors(codes: Array, scales: Array, depends_on: Array) -> tuple[Array, Array]:
    """Returns the result of `KernelQuantizer.dequantize` for int8 kernels."""
    if current_device()[0] != "tpu":
        codes = codes ^ _zero_depending_on(depends_on).astype(codes.dtype)
    return codes.astype(depends_on.dtype), scales


def _dequantize_tiles(quantizer: KernelQuantizer, codes: Array, scales: Array, depends_on: Array) -> tuple[Array]:
    """Returns the kernel of `KernelQuantizer.dequantize` for nf4."""
    import qwix

    codes = codes ^ _zero_depending_on(depends_on).astype(codes.dtype)
    codes = _unpack_4bit(codes, quantizer.dims.index(TILED_DIM))
    return (qwix.dequantize(qwix.QArray(codes, scales, qtype="nf4")),)


def _zero_depending_on(x: Array) -> UInt32[Array, ""]:
    """Returns a zero that depends on `x`.

    Without it, codes would not depend on `x`, and with unrolled layers XLA's CPU scheduler would dequantize all kernels
    first and keep them in memory. An `optimization_barrier` does not help, because XLA removes it before scheduling.
    Other schedulers are not known to need this.
    """
    first = x[(0,) * x.ndim].astype(jnp.float32)
    return jax.lax.bitcast_convert_type(first, jnp.uint32) >> 31 >> 1


def _pack_4bit(codes: Array, axis: int) -> UInt8[Array, "*dims"]:
    """Packs pairs of adjacent codes along an axis into bytes, the first of a pair in the lower half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    low, high = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in range(2))
    return low | high << 4


def _unpack_4bit(codes: UInt8[Array, "*dims"], axis: int) -> UInt8[Array, "*dims"]:
    """Unpacks the result of `_pack_4bit` into one byte per code."""
    halves = jnp.stack([codes & 15, codes >> 4], axis + 1)
    return halves.reshape(*codes.shape[:axis], -1, *codes.shape[axis + 1 :])
