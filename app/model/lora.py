"""LoRA: adapters of low rank that learn beside weights that stay as they are.

A projection x W becomes x W + (alpha / rank) (x A) B, with A [in, rank] drawn and B [rank, out] zeros, so that a fresh
adapter changes nothing. Adapters are float32 and stacked on L like the kernels that they stand beside.

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

ParamTree = dict[str, Any]
"""A nested dict of arrays, or of what stands for them."""

LORA_A, LORA_B = "lora_a", "lora_b"
"""Leaf names of A and B, which stand beside a `kernel` or its codes."""


class LoRAParam(nnx.Param):
    """A weight of an adapter: where a network has any, they alone learn."""


@dataclass(frozen=True, slots=True)
class LoRAConfig:
    """Which projections have adapters, and of what size."""

    rank: int
    alpha: float
    projections: tuple[str, ...]
    """Hugging Face's names: `q_proj`."""

    @property
    def scale(self) -> float:
        """Of what an adapter adds."""
        return self.alpha / self.rank

    def for_projection(self, projection: str) -> LoRAConfig | None:
        """Of one projection; None where it has no adapter."""
        return self if projection in self.projections else None

    def to_text(self) -> str:
        # In full: what is rounded alike here would pass for the same adapters.
        alpha = repr(float(self.alpha)).removesuffix(".0")
        return f"rank {self.rank}, alpha {alpha}, {' '.join(self.projections)}"


def combine_params(trainable: ParamTree, frozen: ParamTree | None) -> ParamTree:
    """Both parts of a network's weights as one tree; the arrays are the same ones."""
    return unflatten_dict(_flat(frozen) | _flat(trainable)) if frozen else trainable


def merge_adapters(params: ParamTree, lora: LoRAConfig | None) -> ParamTree:
    """The weights without adapters that compute the same: W + (alpha / rank) A B in float32, all others as they are.

    A tree that has no adapters stays as it is.
    """
    flat = _flat(params)
    kernels = {
        (*path[:-1], "kernel"): _merge_kernel(flat[*path[:-1], "kernel"], down, flat[*path[:-1], LORA_B], lora)
        for path, down in flat.items()
        if path[-1] == LORA_A
    }
    rest = {path: x for path, x in flat.items() if path[-1] not in (LORA_A, LORA_B)}
    return unflatten_dict(rest | kernels) if kernels else params


def _flat(tree: ParamTree) -> dict[tuple[str, ...], Any]:
    return dict(flatten_dict(tree))


def _merge_kernel(
    kernel: Float32[Array, "L *inputs *outputs"],
    down: Float32[Array, "L *inputs rank"],
    up: Float32[Array, "L rank *outputs"],
    lora: LoRAConfig | None,
) -> Float32[Array, "L *inputs *outputs"]:
    assert lora is not None, "weights with adapters are those of a network that has some"
    contracted = (down.ndim - 1,), (1,)
    product = jax.lax.dot_general(down, up, (contracted, ((0,), (0,))), precision=jax.lax.Precision.HIGHEST)
    return kernel + lora.scale * product


def init_adapters(shapes: ParamTree, shardings: ParamTree, *, seed: int) -> ParamTree:
    """Adapters that change nothing yet, on their shardings. All hosts call it together.

    A is uniform in +-1 / sqrt(in), as PEFT draws it, keyed by seed and path: the same on any mesh, whatever else has
    adapters. B is zeros.
    """

    def draw() -> ParamTree:
        root = jax.random.key(seed)
        return unflatten_dict({path: _init_adapter(root, path, leaf) for path, leaf in _flat(shapes).items()})

    return jax.jit(draw, out_shardings=shardings)()


def _init_adapter(root: Array, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct) -> Array:
    if path[-1] == LORA_B:
        return jnp.zeros(leaf.shape, leaf.dtype)
    key = jax.random.fold_in(root, zlib.crc32("/".join(path).encode()))
    bound = math.prod(leaf.shape[1:-1]) ** -0.5
    return jax.random.uniform(key, leaf.shape, leaf.dtype, -bound, bound)
