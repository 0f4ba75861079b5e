"""LoRA: trainable low-rank adapters next to frozen weights.

A projection x W becomes x W + (alpha / rank) (x A) B. A [in, rank] is random and B [rank, out] is zeros, so that a new
adapter changes nothing. Adapters are float32 and stacked along L like the kernels.

Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", section 4.1.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float32

Params = dict[str, Any]
"""A nested dict of arrays, or of their shapes or shardings: the form in which packages exchange weights."""

ParamPath = tuple[str, ...]

LORA_A, LORA_B = "lora_a", "lora_b"
"""Leaf names of A and B, next to a `kernel` or its codes."""


class LoRAParam(nnx.Param):
    """An adapter weight. In a network with adapters, only these weights are trainable."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """The projections with adapters, and the rank and scale of the adapters."""

    rank: int
    alpha: float
    projections: tuple[str, ...]
    """Hugging Face names of the adapted projections, such as `q_proj`."""

    @property
    def scale(self) -> float:
        """The factor of the adapter's output, alpha / rank."""
        return self.alpha / self.rank

    def to_text(self) -> str:
        """Returns a one-line description that is unique to the configuration."""
        # Not rounded, so that different values give different texts.
        alpha = repr(float(self.alpha)).removesuffix(".0")
        return f"rank {self.rank}, alpha {alpha}, {' '.join(self.projections)}"


def flatten_by_path(tree: Params) -> dict[ParamPath, Any]:
    """Returns a nested dict as a flat dict from key path to leaf."""
    return dict(flatten_dict(tree))


def combine_params(trainable: Params, frozen: Params | None) -> Params:
    """Returns the trainable and frozen weights of a network as one tree, without copying arrays."""
    return unflatten_dict(flatten_by_path(frozen) | flatten_by_path(trainable)) if frozen else trainable


def merge_adapters(params: Params, lora: LoRAConfig | None) -> Params:
    """Returns the weights with kernels W + (alpha / rank) A B, computed in float32, in place of W, A and B."""
    flat = flatten_by_path(params)
    kernels = {
        (*path[:-1], "kernel"): _merge_kernel(flat[*path[:-1], "kernel"], down, flat[*path[:-1], LORA_B], lora)
        for path, down in flat.items()
        if path[-1] == LORA_A
    }
    rest = {path: x for path, x in flat.items() if path[-1] not in (LORA_A, LORA_B)}
    return unflatten_dict(rest | kernels) if kernels else params


def _merge_kernel(
    kernel: Float32[Array, "L *inputs *outputs"],
    down: Float32[Array, "L *inputs rank"],
    up: Float32[Array, "L rank *outputs"],
    lora: LoRAConfig | None,
) -> Float32[Array, "L *inputs *outputs"]:
    assert lora is not None, "weights with adapters need their LoRA configuration"
    contracted = (down.ndim - 1,), (1,)
    product = jax.lax.dot_general(down, up, (contracted, ((0,), (0,))), precision=jax.lax.Precision.HIGHEST)
    return kernel + lora.scale * product


def init_adapters(shapes: Params, shardings: Params, *, seed: int) -> Params:
    """Returns new adapters with the given shardings. All hosts must call it together.

    A is uniform in +-1 / sqrt(in), as in PEFT. It is keyed by seed and path, so it does not depend on the mesh or on
    other adapters. B is zeros.
    """

    def draw() -> Params:
        root = jax.random.key(seed)
        return unflatten_dict({path: _init_adapter(root, path, leaf) for path, leaf in flatten_by_path(shapes).items()})

    return jax.jit(draw, out_shardings=shardings)()


def _init_adapter(root: Array, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Array:
    if path[-1] == LORA_B:
        return jnp.zeros(leaf.shape, leaf.dtype)
    key = jax.random.fold_in(root, zlib.crc32("/".join(path).encode()))
    bound = math.prod(leaf.shape[1:-1]) ** -0.5
    return jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
