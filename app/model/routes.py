"""Routes: the experts that a token passes through in each layer, recorded by the sampler and replayed by the trainer.

Source: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers",
arXiv 2510.11370.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, UInt8

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


def unpack_routes(words: Int32[np.ndarray, "*rows W"], shape: RouteShape) -> UInt8[np.ndarray, "*rows L k"]:
    """Returns the routes of each token from what `app.model.experts.pack_routes` returns."""
    flat = np.ascontiguousarray(words).view(np.uint8)
    return flat[..., : shape.num_layers * shape.experts_per_token].reshape(*words.shape[:-1], *shape)
