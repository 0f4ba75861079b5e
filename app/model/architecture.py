"""The sizes of a decoder network, its switches for differences between model families, and its FLOPs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int64

from settings.schema.model import AttentionImplementation


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding of all H dims of a head; dims i and i + H / 2 are rotated together."""

    theta: float
    rope_type: str = "default"
    """`default`, `linear` or `llama3`."""
    factor: float = 1.0
    """The factor by which the context was extended after pre-training; unused by `default`."""
    low_frequency_factor: float = 1.0
    """With the next two fields, determines which frequencies `llama3` scales; see `rope_frequencies`."""
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


class RouteShape(NamedTuple):
    """Shape of a token's routes: the experts that are chosen for it in each layer."""

    num_layers: int
    experts_per_token: int

    @property
    def num_words(self) -> int:
        """Number of 32-bit words that store a token's routes, with one byte per chosen expert."""
        return -(-self.num_layers * self.experts_per_token // 4)


@dataclass(frozen=True)
class Architecture:
    """The sizes and switches of a decoder-only transformer. Hashable, so it can be a static argument.

    With all switches at their defaults, the network is Llama.
    """

    family: str
    """`model_type` of `config.json`."""
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    """Width of the MLP, or of each expert."""
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_epsilon: float
    max_positions: int
    tied_embeddings: bool
    """Whether the LM head is the embedding matrix; if so, the checkpoint needs no `lm_head.weight`."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """The attention window of each layer in tokens, query included; None = full attention. Empty = None everywhere."""
    windowed_rope: RopeConfig | None = None
    """The rope of layers with a window; None = `rope`."""
    query_scale: float | None = None
    """Factor of the attention scores; None = 1 / sqrt(head_dim)."""
    attention_soft_cap: float | None = None
    """Soft cap of the attention scores: s becomes cap tanh(s / cap) before masking."""
    logit_soft_cap: float | None = None
    """Soft cap of the logits, applied before the temperature."""
    query_key_norms: bool = False
    """Whether each head's queries and keys are normalized before rotation."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP are normalized before they are added to the residual."""
    centered_norms: bool = False
    """Whether norms multiply by 1 + scale in float32 instead of by scale in the compute dtype."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scaled_embeddings: bool = False
    """Whether embeddings are multiplied by sqrt(model_dim), rounded to the compute dtype."""
    num_experts: int | None = None
    """Number of experts of each layer; None = one MLP for all tokens."""
    experts_per_token: int = 1
    """Number of active experts per token; 1 if there is one MLP."""
    normalized_routing: bool = False
    """Whether the probabilities of a token's experts are normalized to sum to 1."""
    attention_implementation: AttentionImplementation = "auto"
    """Implementation of attention over packed rows; the results differ only in rounding."""

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The window of each layer, with one entry per layer even if `windows` is empty."""
        return self.windows or (None,) * self.num_layers

    @property
    def route_shape(self) -> RouteShape | None:
        """Shape of a token's routes; None for a model without experts."""
        return None if self.num_experts is None else RouteShape(self.num_layers, self.experts_per_token)


def token_flops(architecture: Architecture) -> int:
    """Returns the FLOPs of the layers' matmuls for one token: twice the number of weights that it uses."""
    a = architecture
    attention = a.model_dim * a.head_dim * 2 * (a.num_query_heads + a.num_kv_heads)
    mlp = 3 * a.model_dim * a.mlp_dim * a.experts_per_token
    router = a.model_dim * (a.num_experts or 0)
    return 2 * a.num_layers * (attention + mlp + router)


def pair_flops(architecture: Architecture) -> int:
    """Returns the attention FLOPs of one layer for one visible (query, key) pair: 4 x head size per query head."""
    return 4 * architecture.num_query_heads * architecture.head_dim


def lm_head_flops(architecture: Architecture) -> int:
    """Returns the FLOPs of computing one token's logits."""
    return 2 * architecture.model_dim * architecture.vocab_size


def forward_flops(architecture: Architecture) -> Callable[[np.ndarray], Int64[np.ndarray, "N"]]:
    """Returns a function that maps sequence lengths, in tokens, to the FLOPs of the layers for each sequence.

    The FLOPs exclude the LM head, which runs only over completion tokens.
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
