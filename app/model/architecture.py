"""What the decoder needs to know of a network: its sizes, and a switch for each thing that families do differently."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.model.rope import RopeConfig


@dataclass(frozen=True)
class Architecture:
    """One decoder-only transformer. Hashable, so it can be a static argument.

    Switches are off by default: what is left is Llama.
    """

    family: str
    """`model_type` of `config.json`."""
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    norm_epsilon: float
    max_positions: int
    tied_embeddings: bool
    """The LM head is the embedding matrix; the checkpoint then holds no `lm_head.weight`."""
    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    """Of each layer: how many tokens a token sees, itself included; None = all before it. Empty = None everywhere."""
    windowed_rope: RopeConfig | None = None
    """Of the layers with a window, where it is not `rope`."""
    query_scale: float | None = None
    """Factor of the attention scores; 1 / sqrt(head_dim) when None."""
    attention_soft_cap: float | None = None
    """Scores s become cap tanh(s / cap) before the mask."""
    logit_soft_cap: float | None = None
    """The same for logits, before any temperature."""
    query_key_norms: bool = False
    """Each head's queries and keys are normed before they are rotated."""
    post_norms: bool = False
    """What attention and MLP give is normed once more before it is added to the residual."""
    centered_norms: bool = False
    """Norms multiply by 1 + scale, in float32; else by scale, in the compute type."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    scaled_embeddings: bool = False
    """Embeddings are multiplied by sqrt(model_dim), rounded to the compute type."""

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """One entry per layer, whatever the family."""
        return self.windows or (None,) * self.num_layers
