"""The layers of a decoder in Flax NNX; each weight is declared with its shape and logical dims."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Float32

from app.mesh.axis_rules import current_device
from app.model.architecture import Architecture, RopeConfig
from app.model.lora import LoRAConfig, LoRAParam
from app.model.quantization import KernelQuantizer
from settings.schema.model import Quantization

INITIAL_STDDEV = 0.02

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


def make_param(
    rngs: nnx.Rngs,
    sizes: Mapping[str, int],
    *,
    init: str = "normal",
    param_class: type[nnx.Param] = nnx.Param,
    dtype: Any = jnp.float32,
) -> nnx.Param:
    """Returns a new parameter; `sizes` maps its logical dims to their sizes.

    Args:
        init: `normal`, `ones` or `zeros`.
    """
    initializers = {
        "normal": nnx.initializers.normal(INITIAL_STDDEV),
        "ones": nnx.initializers.ones,
        "zeros": nnx.initializers.zeros,
    }
    return param_class(initializers[init](rngs.params(), tuple(sizes.values()), dtype), dims=tuple(sizes))


class RMSNorm(nnx.Module):
    """Root-mean-square layer norm over the last dim: x / sqrt(mean(x^2) + eps) * scale. Source: Zhang & Sennrich 2019.

    A centered norm multiplies by 1 + scale and rounds to the compute dtype only afterwards. The scale is stored as in
    the checkpoint: if 1 + scale were stored, an export would not reproduce the scale bit for bit.
    """

    def __init__(self, arch: Architecture, rngs: nnx.Rngs, size: dict[str, int], *, stack: dict[str, int]):
        self.epsilon = arch.norm_epsilon
        self.centered = arch.centered_norms
        self.scale = make_param(rngs, {**stack, **size}, init="zeros" if self.centered else "ones")

    def __call__(self, x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
        x32 = x.astype(jnp.float32)
        normed = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale[...].astype(x.dtype)
        if self.centered:
            return (normed * (1 + scale.astype(jnp.float32))).astype(x.dtype)
        return normed.astype(x.dtype) * scale


def identity(x: Array) -> Array:
    """Returns its argument; replaces a norm that the family does not have."""
    return x


PROJECTION_CHECKPOINT_NAME = "product"
"""Name of the projection outputs in `jax.checkpoint` policies."""


def keep_result(x: Array, name: str) -> Array:
    """Names a result of a layer, so that `jax.checkpoint` policies can save it for the backward pass.

    On CPUs, XLA stores one layer's bfloat16 results in the stacked array by converting the whole array to float32 and
    back. It does not convert integers, so the bits are saved as integers.
    """
    is_converted = x.dtype == jnp.bfloat16 and current_device()[0] == "cpu"
    return _keep_bits(name, x) if is_converted else checkpoint_name(x, name)


def _name_bits(name: str, x: Array) -> Array:
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


_keep_bits = jax.custom_vjp(_name_bits, nondiff_argnums=(0,))
# The forward pass is the plain function, because policies do not see names inside a function with a custom gradient.
_keep_bits.defvjp(lambda name, x: (_name_bits(name, x), None), lambda name, _, gradient: (gradient,))


class Projection(nnx.Module):
    """A linear layer: a kernel with its input dims first, and a bias if the family has one.

    Kernels for decoding may have their output dims first; see `DecoderDefinition.outputs_first`.

    With an adapter it computes x W + scale (x A) B; A and B are zeros until `app.model.lora.init_adapters`. A quantized
    W, also initially zeros, is dequantized for each matmul.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        inputs: dict[str, int],
        outputs: dict[str, int],
        *,
        bias: bool,
        stack: dict[str, int],
        lora: LoRAConfig | None,
        quantization: Quantization | None,
        outputs_first: bool = False,
    ):
        self.num_input_dims, self.outputs_first = len(inputs), outputs_first
        sizes, is_int8 = {**outputs, **inputs} if outputs_first else {**inputs, **outputs}, quantization == "int8"
        if quantization is None:
            self.kernel = make_param(rngs, {**stack, **sizes})
        else:
            self.quantizer = KernelQuantizer(quantization, tuple(sizes), tuple(outputs if is_int8 else sizes))
            codes, scales = self.quantizer.sizes(sizes)
            self.codes = make_param(rngs, {**stack, **codes}, init="zeros", dtype=jnp.int8 if is_int8 else jnp.uint8)
            self.scales = make_param(rngs, {**stack, **scales}, init="zeros")
        if bias:
            self.bias = make_param(rngs, {**stack, **outputs}, init="zeros")
        if lora is not None:
            self.lora_scale = lora.scale
            rank = {"lora_rank": lora.rank}
            self.lora_a = make_param(rngs, {**stack, **inputs, **rank}, init="zeros", param_class=LoRAParam)
            self.lora_b = make_param(rngs, {**stack, **rank, **outputs}, init="zeros", param_class=LoRAParam)

    def __call__(self, x: Float[Array, "*tokens *inputs"]) -> Float[Array, "*tokens *outputs"]:
        y = self._product(x)
        if hasattr(self, "lora_a"):
            low = contract_dims(x, self.lora_a[...], num_dims=self.num_input_dims)
            y = y + self.lora_scale * contract_dims(low, self.lora_b[...], num_dims=1)
        y = keep_result(y, PROJECTION_CHECKPOINT_NAME)
        return y + self.bias[...].astype(x.dtype) if hasattr(self, "bias") else y

    def _product(self, x: Float[Array, "*tokens *inputs"]) -> Float[Array, "*tokens *outputs"]:
        if self.outputs_first:
            return contract_last_dims(x, self.kernel[...], num_dims=self.num_input_dims).astype(x.dtype)
        if hasattr(self, "kernel"):
            return contract_dims(x, self.kernel[...], num_dims=self.num_input_dims)

        def dequantize_and_contract(x: Array, codes: Array, scales: Array) -> Array:
            tokens = x.reshape(-1, *x.shape[-self.num_input_dims :])
            kernel, factors = self.quantizer.dequantize(codes, scales, depends_on=tokens)
            y = contract_dims(x, kernel, num_dims=self.num_input_dims)
            return y if factors is None else (y * factors).astype(x.dtype)

        # The backward pass dequantizes kernels again; otherwise the float kernels of all layers would be saved for it.
        return jax.checkpoint(dequantize_and_contract, prevent_cse=False)(x, self.codes[...], self.scales[...])


def contract_dims(
    x: Float[Array, "*tokens *inputs"], matrix: Float[Array, "*inputs *outputs"], *, num_dims: int
) -> Float[Array, "*tokens *outputs"]:
    """Contracts the last `num_dims` dims of `x` with the first `num_dims` dims of the matrix."""
    matrix = matrix.astype(x.dtype)
    if x.dtype == jnp.bfloat16 and current_device()[0] == "cpu":
        return _contract_on_cpu(num_dims, x, matrix)
    return _contract(x, matrix, range(x.ndim - num_dims, x.ndim), range(num_dims), x.dtype)


def _contract(x: Array, y: Array, dims_of_x: Sequence[int], dims_of_y: Sequence[int], dtype: Any) -> Array:
    return jax.lax.dot_general(x, y, ((tuple(dims_of_x), tuple(dims_of_y)), ((), ())), preferred_element_type=dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _contract_on_cpu(num_dims: int, x: Array, matrix: Array) -> Array:
    """Computes `contract_dims` for bfloat16 arguments on a CPU.

    Many CPUs have bfloat16 matmul instructions, several times as fast as those for float32. XLA uses them only if both
    factors are bfloat16 and the result is float32, also in the backward pass.
    """
    return _contract(x, matrix, range(x.ndim - num_dims, x.ndim), range(num_dims), jnp.float32).astype(x.dtype)


def _contract_on_cpu_backward(num_dims: int, saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, matrix = saved
    num_outputs = matrix.ndim - num_dims
    outputs = range(gradient.ndim - num_outputs, gradient.ndim)
    of_x = _contract(gradient, matrix, outputs, range(num_dims, matrix.ndim), jnp.float32)
    rows = gradient.reshape(-1, math.prod(matrix.shape[num_dims:]))
    # XLA cannot run this matmul with the transposition folded into it, which the barrier prevents.
    columns = jax.lax.optimization_barrier(x.reshape(len(rows), -1).T)
    of_matrix = _contract(columns, rows, (1,), (0,), jnp.float32).reshape(matrix.shape)
    return of_x.astype(x.dtype), of_matrix.astype(matrix.dtype)


_contract_on_cpu.defvjp(
    lambda num_dims, x, matrix: (_contract_on_cpu(num_dims, x, matrix), (x, matrix)), _contract_on_cpu_backward
)


def contract_last_dims(
    x: Float[Array, "*tokens *inputs"], matrix: Float[Array, "*outputs *inputs"], *, num_dims: int
) -> Float32[Array, "*tokens *outputs"]:
    """Contracts the last `num_dims` dims of both arguments. With few tokens, CPUs compute this order of dims faster.

    For float32, the matrix is the first factor, which is 1.4 to 2 times as fast; the barrier keeps XLA from swapping
    the factors.
    """
    tokens, outputs = x.shape[: x.ndim - num_dims], matrix.shape[: matrix.ndim - num_dims]
    rows, factor = x.reshape(math.prod(tokens), -1), matrix.astype(x.dtype).reshape(math.prod(outputs), -1)
    if x.dtype == jnp.float32:
        product = jax.lax.optimization_barrier(_contract(factor, rows, (1,), (1,), jnp.float32)).T
    else:
        product = _contract(rows, factor, (1,), (1,), jnp.float32)
    return product.reshape(*tokens, *outputs)


def rope_frequencies(rope: RopeConfig, head_dim: int) -> Float32[np.ndarray, " H/2"]:
    """Returns the radians per position of each rotated pair.

        default   f_i = theta^(-2i / H)
        linear    f_i / factor
        llama3    f_i              if the wavelength 2 pi / f_i < original / high
                  f_i / factor     if the wavelength > original / low
                  (1 - s) f_i / factor + s f_i   otherwise, with s = (original f_i / (2 pi) - low) / (high - low)

    Source: Su et al. 2021 (RoFormer) eq. 15; Chen et al. 2023 (position interpolation);
    Llama 3.1 reference code, `apply_scaling`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # Models were trained with torch's float32 powers. numpy's differ in the last bit; rounded float64 powers do not.
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / np.float32(rope.factor)
    assert rope.rope_type == "llama3"
    turns = rope.original_max_positions * frequencies / (2 * np.pi)
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return ((1 - kept) * frequencies / rope.factor + kept * frequencies).astype(np.float32)


@jax.custom_vjp
def apply_rope(x: Float[Array, "R T heads H"], angles: Float[Array, "2 R T half"]) -> Float[Array, "R T heads H"]:
    """Applies rotary position embedding to the halves of each head: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin).

    Args:
        angles: cosines and sines, computed once for all layers, because a TPU compiles and computes them slowly.

    Source: Su et al. 2021, RoFormer, eq. 34, with dims paired (i, i + H/2).
    """
    cos, sin = jnp.concatenate([angles] * 2, axis=-1)[:, :, :, None, :]
    return (x.astype(jnp.float32) * cos + _quarter_turn(x) * sin).astype(x.dtype)


def _rope_backward(angles: Array, gradient: Array) -> tuple[Array, None]:
    """Returns the gradient of `x`, rotated back by the same angles; the angles get no gradient."""
    return apply_rope(gradient, angles * jnp.array([1, -1], angles.dtype).reshape(2, 1, 1, 1)), None


apply_rope.defvjp(lambda x, angles: (apply_rope(x, angles), angles), _rope_backward)


def _quarter_turn(x: Float[Array, "R T heads H"]) -> Float32[Array, "R T heads H"]:
    """Returns (-x2, x1) of the halves (x1, x2) of every head."""
    half = x.shape[-1] // 2
    if current_device()[0] != "tpu":
        x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
        return jnp.concatenate([-x2, x1], axis=-1)
    # A TPU moves parts of a register slowly. This matmul is exact, and three times as fast by the compiler's estimate.
    turn = np.kron([[0, 1], [-1, 0]], np.eye(half))
    exact = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return jnp.einsum("rtqh,hg->rtqg", x, turn.astype(x.dtype), precision=exact, preferred_element_type=jnp.float32)
