"""The FLOPs of a forward pass, computed from the network's sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from app.model.architecture import Architecture


def forward_flops(architecture: Architecture) -> Callable[[np.ndarray], Int64[np.ndarray, "N"]]:
    """Returns a function that maps lengths in tokens to the blocks' FLOPs for a sequence of each length.

    Counts 2 x parameters of the blocks' matrices per token, and 4 x query heads x head size per layer and visible pair
    of tokens (2 for the score, 2 for the value). Leaves out the LM head, which runs over completion tokens only.
    """
    a = architecture
    attention = a.model_dim * a.head_dim * 2 * (a.num_query_heads + a.num_kv_heads)
    per_token = 2 * a.num_layers * (attention + 3 * a.model_dim * a.mlp_dim)
    per_pair = 4 * a.num_query_heads * a.head_dim

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        lengths = np.asarray(lengths, np.int64)
        # Layers have few distinct windows, so pairs are counted once per window.
        pairs = sum(n * num_visible_pairs(lengths, window) for window, n in Counter(a.layer_windows).items())
        return per_token * lengths + per_pair * pairs

    return flops


def num_visible_pairs(lengths: Int64[np.ndarray, "N"], window: int | None) -> Int64[np.ndarray, "N"]:
    """Returns the number of visible (query, key) pairs of causal attention in a sequence of each length."""
    full = lengths if window is None else np.minimum(lengths, window)
    return full * (full + 1) // 2 + (lengths - full) * full
