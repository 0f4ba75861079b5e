"""The FLOPs of a forward pass, computed from the network's sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
from jaxtyping import Int64

from app.model.architecture import Architecture


def token_flops(architecture: Architecture) -> int:
    """Returns the FLOPs of the blocks' matrices for one token: 2 x the parameters through which it passes."""
    a = architecture
    attention = a.model_dim * a.head_dim * 2 * (a.num_query_heads + a.num_kv_heads)
    mlp = 3 * a.model_dim * a.mlp_dim * a.experts_per_token
    router = a.model_dim * (a.num_experts or 0)
    return 2 * a.num_layers * (attention + mlp + router)


def pair_flops(architecture: Architecture) -> int:
    """Returns the FLOPs of one layer for one visible pair of tokens: per query head, 2 x head size twice."""
    return 4 * architecture.num_query_heads * architecture.head_dim


def lm_head_flops(architecture: Architecture) -> int:
    """Returns the FLOPs of the logits of one token."""
    return 2 * architecture.model_dim * architecture.vocab_size


def forward_flops(architecture: Architecture) -> Callable[[np.ndarray], Int64[np.ndarray, "N"]]:
    """Returns a function that maps lengths in tokens to the blocks' FLOPs for a sequence of each length.

    Leaves out the LM head, which runs over completion tokens only.
    """

    def flops(lengths: np.ndarray) -> Int64[np.ndarray, "N"]:
        lengths = np.asarray(lengths, np.int64)
        # Layers have few distinct windows, so pairs are counted once per window.
        windows = Counter(architecture.layer_windows)
        pairs = sum(n * num_visible_pairs(lengths, window) for window, n in windows.items())
        return token_flops(architecture) * lengths + pair_flops(architecture) * pairs

    return flops


def num_visible_pairs(lengths: Int64[np.ndarray, "N"], window: int | None) -> Int64[np.ndarray, "N"]:
    """Returns the number of visible (query, key) pairs of causal attention in a sequence of each length."""
    full = lengths if window is None else np.minimum(lengths, window)
    return full * (full + 1) // 2 + (lengths - full) * full
