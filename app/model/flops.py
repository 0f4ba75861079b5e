"""What a forward pass costs, from the network's sizes alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from app.model.architecture import Architecture


def forward_flops(architecture: Architecture) -> Callable[[np.ndarray], Int64[np.ndarray, "N"]]:
    """Lengths in tokens -> FLOPs that the blocks spend on a lone sequence of each length, whole numbers.

    2 x parameters of the blocks' matrices per token, and 4 x query heads x head size per layer and pair of a token with
    a token that it sees (2 for the score, 2 for the value). The LM head is left out: it runs over completion tokens
    only, which a length does not tell.
    """
    a = architecture
    attention = a.model_dim * a.head_dim * 2 * (a.num_query_heads + a.num_kv_heads)
    per_token = 2 * a.num_layers * (attention + 3 * a.model_dim * a.mlp_dim)
    per_pair = 4 * a.num_query_heads * a.head_dim

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        lengths = np.asarray(lengths, np.int64)
        # Layers have few different windows: count the pairs of each once.
        windows = {window: a.layer_windows.count(window) for window in a.layer_windows}
        pairs = sum(count * num_visible_pairs(lengths, window) for window, count in windows.items())
        return per_token * lengths + per_pair * pairs

    return flops


def num_visible_pairs(lengths: Int64[np.ndarray, "N"], window: int | None) -> Int64[np.ndarray, "N"]:
    """How many (query, key) pairs causal attention has in a sequence of each length."""
    full = lengths if window is None else np.minimum(lengths, window)
    return full * (full + 1) // 2 + (lengths - full) * full
