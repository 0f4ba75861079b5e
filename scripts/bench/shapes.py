"""Sizes of published models, from their config.json, for scripts that need no weights."""

from __future__ import annotations

from app.policy.architecture import Architecture
from app.policy.rope import Rope


def _qwen2_5(
    num_layers: int, model_dim: int, mlp_dim: int, query_heads: int, kv_heads: int, *, vocab_size: int, tied: bool
) -> Architecture:
    return Architecture(
        family="qwen2",
        vocab_size=vocab_size,
        num_layers=num_layers,
        model_dim=model_dim,
        mlp_dim=mlp_dim,
        num_query_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        rope=Rope(theta=1e6),
        norm_epsilon=1e-6,
        max_positions=32_768,
        tied_embeddings=tied,
        qkv_bias=True,
    )


QWEN2_5_1_5B = _qwen2_5(28, 1536, 8960, 12, 2, vocab_size=151_936, tied=True)
QWEN2_5_3B = _qwen2_5(36, 2048, 11_008, 16, 2, vocab_size=151_936, tied=True)
QWEN2_5_7B = _qwen2_5(28, 3584, 18_944, 28, 4, vocab_size=152_064, tied=False)
