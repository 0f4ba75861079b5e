"""Lists the sizes of published models, for scripts that use no real weights."""

from __future__ import annotations

from typing import Any

from app.model.io.families import qwen2


def _qwen2_5(
    num_layers: int,
    model_dim: int,
    mlp_dim: int,
    query_heads: int,
    kv_heads: int,
    *,
    vocab_size: int = 151_936,
    tied: bool = True,
) -> dict[str, Any]:
    return {
        **{"model_type": "qwen2", "hidden_size": model_dim, "intermediate_size": mlp_dim},
        **{"num_hidden_layers": num_layers, "num_attention_heads": query_heads, "num_key_value_heads": kv_heads},
        **{"vocab_size": vocab_size, "tie_word_embeddings": tied, "max_position_embeddings": 32_768},
        **{"rope_theta": 1e6, "rms_norm_eps": 1e-6, "use_sliding_window": False},
    }


QWEN2_5 = {
    "Qwen2.5-0.5B": _qwen2_5(24, 896, 4864, 14, 2),
    "Qwen2.5-1.5B": _qwen2_5(28, 1536, 8960, 12, 2),
    "Qwen2.5-3B": _qwen2_5(36, 2048, 11_008, 16, 2),
    "Qwen2.5-7B": _qwen2_5(28, 3584, 18_944, 28, 4, vocab_size=152_064, tied=False),
}
"""Maps each model to the fields of its `config.json` that determine its network."""
_QWEN3 = {
    **{"head_dim": 128, "vocab_size": 151_936, "tie_word_embeddings": False, "max_position_embeddings": 40_960},
    **{"rope_theta": 1e6, "rms_norm_eps": 1e-6, "use_sliding_window": False, "attention_bias": False},
}
QWEN3 = {
    "Qwen3-32B": {
        **{**_QWEN3, "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25_600},
        **{"num_hidden_layers": 64, "num_attention_heads": 64, "num_key_value_heads": 8},
    },
    "Qwen3-30B-A3B": {
        **{**_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144},
        **{"num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True},
        **{"decoder_sparse_step": 1, "mlp_only_layers": []},
    },
}
MODELS = {**QWEN2_5, **QWEN3}
SMOLLM2 = {
    "SmolLM2-135M": {
        **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
        **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 49_152},
        "rope_theta": 1e5,
    }
}
QWEN2_5_0_5B = qwen2(QWEN2_5["Qwen2.5-0.5B"])
QWEN2_5_1_5B = qwen2(QWEN2_5["Qwen2.5-1.5B"])
QWEN2_5_3B = qwen2(QWEN2_5["Qwen2.5-3B"])
QWEN2_5_7B = qwen2(QWEN2_5["Qwen2.5-7B"])
