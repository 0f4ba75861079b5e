"""Routes: the experts that a token passes through in each layer, recorded by the sampler and replayed by the trainer.

Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32, UInt8

UNRECORDED = 255
"""Takes the place of all experts of a token in a layer for which none are recorded."""


class RouteShape(NamedTuple):
    """Sizes of the routes of a token."""

    num_layers: int
    experts_per_token: int

    @property
    def num_words(self) -> int:
        """Number of 32-bit words that hold the routes of a token, one byte for each choice."""
        return -(-self.num_layers * self.experts_per_token // 4)


def pack_routes(chosen: Int32[Array, "L *rows k"]) -> Int32[Array, "*rows W"]:
    """Returns the bytes of each token's routes, layer by layer, as words; the inverse of `unpack_routes`."""
    by_token = jnp.moveaxis(chosen, 0, -2)
    flat = by_token.reshape(*by_token.shape[:-2], -1).astype(jnp.uint8)
    padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 4)])
    return jax.lax.bitcast_convert_type(padded.reshape(*flat.shape[:-1], -1, 4), jnp.int32)


def unpack_routes(words: Int32[np.ndarray, "*rows W"], shape: RouteShape) -> UInt8[np.ndarray, "*rows L k"]:
    flat = np.ascontiguousarray(words).view(np.uint8)
    return flat[..., : shape.num_layers * shape.experts_per_token].reshape(*words.shape[:-1], *shape)
