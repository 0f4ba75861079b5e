"""The model families: converts the Hugging Face `config.json` of each family to an `Architecture`.

Missing optional fields take transformers' defaults; sizes are required. A field that changes the network in a way that
the decoder does not support is never ignored: it raises an InputError.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from app.model.architecture import Architecture, RopeConfig
from app.model.io.config_fields import (
    HfConfig,
    boolean,
    json_object,
    nullable_field,
    parse_rope,
    positive_float,
    positive_int,
    read_num_layers,
)
from settings.errors import InputError, join_words
from settings.schema.model import AttentionImplementation

FULL, SLIDING = "full_attention", "sliding_attention"


UNSUPPORTED_FIELDS = {
    "quantization_config": "quantized weights cannot be trained; use the original model",
    "kv_lora_rank": "latent attention (MLA) is not supported; use a model with grouped queries",
    "linear_num_value_heads": "linear attention (DeltaNet) is not supported; use a model with softmax attention only",
    "n_shared_experts": "shared experts are not supported; use a model whose experts are all routed",
    "shared_expert_intermediate_size": "shared experts are not supported; use a model whose experts are all routed",
    "mlp_only_layers": "layers without experts are not supported in a mixture; use a model with experts in every layer",
    "router_jitter_noise": "noise in the router makes trainer and sampler disagree; set it to 0",
    "attention_chunk_size": "chunked attention is not supported; use a model with full or sliding attention",
    "use_bidirectional_attention": "only causal language models can be sampled; use a causal model",
}
"""Fields that no supported family may set, with the reason and the way out."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Names of the field with the number of experts. For Qwen3-MoE, transformers 4 writes the first and 5 the second."""


class Family(NamedTuple):
    causal_lm: str
    """The `architectures` entry of the family's causal language model."""
    parse_config: Callable[[HfConfig], Architecture]
    classifier: str | None = None
    """The `architectures` entry of sequence classification; None if it differs from `causal_lm` only in the suffix."""

    def architecture_name(self, head: str) -> str:
        """Returns the `architectures` entry of a network whose head has this suffix."""
        if self.classifier is not None and head in SEQUENCE_CLASSIFICATION:
            return self.classifier
        return self.causal_lm.removesuffix(*CAUSAL_LM) + head


CAUSAL_LM = ("ForCausalLM",)
SEQUENCE_CLASSIFICATION = ("ForSequenceClassification",)


def architecture_from_config(
    config: HfConfig, *, heads: Sequence[str] = CAUSAL_LM, attention: AttentionImplementation = "auto"
) -> Architecture:
    """Returns the architecture of a parsed `config.json`.

    Args:
        heads: the accepted kinds of network, as suffixes of `architectures` entries.

    Raises:
        InputError: the model has remote code, its family is unknown, or a field is unsupported, missing or malformed.
    """
    if config.get("auto_map"):
        raise InputError(
            "config.json has `auto_map`: this model brings its own Python code, which is never run; use a model of "
            f"type {join_words(FAMILIES)}"
        )
    model_type = config.get("model_type")
    if "text_config" in config or "vision_config" in config:
        inner = config.get("text_config")
        inner_type = inner.get("model_type") if isinstance(inner, dict) else None
        text_only = f" of model_type {inner_type!r}" if inner_type in list(FAMILIES) else ""
        raise InputError(
            f"config.json: model_type={model_type!r} combines a language model with an image or sound encoder, which "
            f"is not supported; use a text-only checkpoint{text_only}"
        )
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        known = [
            f" (`{field}`: {why.partition(';')[0]})" for field, why in UNSUPPORTED_FIELDS.items() if config.get(field)
        ]
        raise InputError(
            f"config.json: model_type={model_type!r} is not supported{''.join(known[:1])}; "
            f"use a model of type {join_words(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    declared = config.get("architectures") or [family.causal_lm]
    supported = [family.architecture_name(head) for head in heads]
    if declared not in [[name] for name in supported]:
        raise InputError(
            f"config.json: architectures={declared!r} is not supported for model_type={model_type!r}; "
            f"use a checkpoint of {join_words(supported)}"
        )
    for field, why in UNSUPPORTED_FIELDS.items():
        if config.get(field):
            raise InputError(f"config.json has `{field}`: {why}")
    architecture = family.parse_config(config)
    for field in EXPERT_COUNTS if architecture.num_experts is None else ():
        if config.get(field):
            raise InputError(
                f"config.json has `{field}`: mixtures of experts are not supported for model_type={model_type!r}; use "
                "one of model_type qwen3_moe or mixtral, or a dense model"
            )
    return replace(architecture, attention_implementation=attention)


def llama(config: HfConfig) -> Architecture:
    """Reads the configuration of Llama 2 and 3, SmolLM2 and other models in the same format."""
    if config.get("use_sliding_window"):
        raise InputError("config.json: use_sliding_window=true is not supported for model_type='llama'; remove it")
    return _architecture(
        config,
        windows=_uniform_windows(config, None),
        **_attention_biases(config),
        mlp_bias=boolean(config, "mlp_bias"),
    )


def mistral(config: HfConfig) -> Architecture:
    """Reads the configuration of Mistral: Llama with one sliding window for all layers. Source: Jiang et al. 2023."""
    return _architecture(config, windows=_uniform_windows(config, _sliding_window(config)))


def qwen2(config: HfConfig) -> Architecture:
    """Reads the configuration of Qwen2 and 2.5: Llama with biases on query, key and value."""
    return _architecture(config, windows=_qwen_windows(config), qkv_bias=True)


def qwen3(config: HfConfig) -> Architecture:
    """Reads the configuration of Qwen3: Llama with normalized queries and keys. Source: Yang et al. 2025, section 2."""
    return _architecture(
        config,
        default_head_dim=128,
        windows=_qwen_windows(config),
        **_attention_biases(config),
        query_key_norms=True,
    )


def mixtral(config: HfConfig) -> Architecture:
    """Reads the configuration of Mixtral: Mistral with experts. Source: Jiang et al. 2024, section 2."""
    return _architecture(
        config,
        windows=_uniform_windows(config, nullable_field(positive_int, config, "sliding_window", default=None)),
        rope=_rope(config, default_theta=1_000_000.0),
        default_norm_epsilon=1e-5,
        **_experts(config),
        normalized_routing=True,
    )


def qwen3_moe(config: HfConfig) -> Architecture:
    """Reads the configuration of Qwen3-MoE: Qwen3 with experts. Source: Yang et al. 2025, section 2."""
    if (step := positive_int(config, "decoder_sparse_step", default=1)) != 1:
        raise InputError(
            f"config.json: decoder_sparse_step={step} is not supported: {UNSUPPORTED_FIELDS['mlp_only_layers']}"
        )
    window = _sliding_window(config) if boolean(config, "use_sliding_window") else None
    return _architecture(
        config,
        width_field="moe_intermediate_size",
        windows=_uniform_windows(config, window),
        **_attention_biases(config),
        query_key_norms=True,
        **_experts(config),
        normalized_routing=boolean(config, "norm_topk_prob"),
    )


def gemma2(config: HfConfig) -> Architecture:
    """Reads the configuration of Gemma 2: soft caps, norms before and after sublayers, and windows in alternate layers.

    Source: Riviere et al. 2024, section 2.
    """
    return _gemma(
        config,
        windows=_windows(config, lambda layer: layer % 2 == 0, _sliding_window(config)),
        attention_soft_cap=nullable_field(positive_float, config, "attn_logit_softcapping", default=50.0),
        logit_soft_cap=nullable_field(positive_float, config, "final_logit_softcapping", default=30.0),
    )


def gemma3_text(config: HfConfig) -> Architecture:
    """Reads the configuration of Gemma 3: Gemma 2 with query and key norms, two ropes, and no soft cap of scores.

    Source: Kamath et al. 2025, section 2.
    """
    if config.get("attn_logit_softcapping") is not None:
        # transformers reads the field but never uses it, so it is unclear how such weights were trained.
        raise InputError(
            "config.json: attn_logit_softcapping must be null for model_type='gemma3_text', got "
            f"{config['attn_logit_softcapping']!r}; use the model's original config.json"
        )
    pattern = positive_int(config, "sliding_window_pattern", default=6)
    rope, windowed_rope = _ropes_by_layer_type(config)
    return _gemma(
        config,
        windows=_windows(config, lambda layer: (layer + 1) % pattern != 0, _sliding_window(config)),
        rope=rope,
        windowed_rope=windowed_rope,
        query_key_norms=True,
        logit_soft_cap=nullable_field(positive_float, config, "final_logit_softcapping", default=None),
    )


FAMILIES: dict[str, Family] = {
    "llama": Family("LlamaForCausalLM", llama),
    "mistral": Family("MistralForCausalLM", mistral),
    "qwen2": Family("Qwen2ForCausalLM", qwen2),
    "qwen3": Family("Qwen3ForCausalLM", qwen3),
    "mixtral": Family("MixtralForCausalLM", mixtral),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", qwen3_moe),
    "gemma2": Family("Gemma2ForCausalLM", gemma2),
    "gemma3_text": Family("Gemma3ForCausalLM", gemma3_text, classifier="Gemma3TextForSequenceClassification"),
}
"""Maps a `model_type` to its family; all supported families."""


def _gemma(config: HfConfig, **switches: Any) -> Architecture:
    """Returns an architecture with the switches that Gemma 2 and 3 share, and the given ones."""
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise InputError(
            f"config.json: hidden_activation must be 'gelu_pytorch_tanh', got {activation!r}; use the original file"
        )
    # Old files have "gelu", with the same meaning.
    if config.get("hidden_act") not in (None, "gelu", "gelu_pytorch_tanh"):
        raise InputError(
            f"config.json: hidden_act={config['hidden_act']!r} contradicts hidden_activation={activation!r}; remove "
            "hidden_act"
        )
    return _architecture(
        config,
        default_head_dim=256,
        tied_by_default=True,
        query_scale=positive_float(config, "query_pre_attn_scalar", default=256) ** -0.5,
        **_attention_biases(config),
        post_norms=True,
        centered_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        **switches,
    )


def _architecture(
    config: HfConfig,
    *,
    default_head_dim: int | None = None,
    default_norm_epsilon: float = 1e-6,
    tied_by_default: bool = False,
    width_field: str = "intermediate_size",
    **switches: Any,
) -> Architecture:
    """Returns an architecture with the given switches, and with the sizes from fields that all families share.

    Args:
        width_field: the field with the width of the MLP, or of each expert.
    """
    num_query_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", default=num_query_heads)
    if num_query_heads % num_kv_heads:
        raise InputError(
            f"config.json: num_attention_heads={num_query_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}, so query heads cannot share key/value heads evenly; "
            "correct the wrong one"
        )
    model_dim = positive_int(config, "hidden_size")
    if config.get("head_dim") is None and default_head_dim is None and model_dim % num_query_heads:
        raise InputError(
            f"config.json: hidden_size={model_dim} is not a multiple of "
            f"num_attention_heads={num_query_heads}, and head_dim is missing; add head_dim"
        )
    head_dim = positive_int(config, "head_dim", default=default_head_dim or model_dim // num_query_heads)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim must be even for rotary embedding, got {head_dim}; correct it")
    if "rope" not in switches:
        switches["rope"] = _rope(config)
    if "activation" not in switches and config.get("hidden_act", "silu") != "silu":
        raise InputError(f"config.json: hidden_act={config['hidden_act']!r} is not supported; use a model with 'silu'")
    return Architecture(
        family=config["model_type"],
        vocab_size=positive_int(config, "vocab_size"),
        num_layers=read_num_layers(config),
        model_dim=model_dim,
        mlp_dim=positive_int(config, width_field),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        norm_epsilon=positive_float(config, "rms_norm_eps", default=default_norm_epsilon),
        max_positions=positive_int(config, "max_position_embeddings"),
        tied_embeddings=boolean(config, "tie_word_embeddings", default=tied_by_default),
        **switches,
    )


def _attention_biases(config: HfConfig) -> dict[str, Any]:
    """Returns the `Architecture` fields for biases; the four projections of attention share one value."""
    return dict.fromkeys(("qkv_bias", "attention_output_bias"), boolean(config, "attention_bias"))


def _experts(config: HfConfig) -> dict[str, Any]:
    """Returns the `Architecture` fields for the number of experts and of active experts per token."""
    counts = {positive_int(config, field) for field in EXPERT_COUNTS if config.get(field) is not None}
    if len(counts) > 1:
        raise InputError(
            f"config.json: {' and '.join(EXPERT_COUNTS)} are two names of one field, but differ: "
            f"{min(counts)} and {max(counts)}; remove the wrong one"
        )
    num_experts = counts.pop() if counts else positive_int(config, EXPERT_COUNTS[0])
    per_token = positive_int(config, "num_experts_per_tok")
    if per_token > num_experts:
        raise InputError(f"config.json: num_experts_per_tok={per_token} exceeds the {num_experts} experts; correct it")
    return {"num_experts": num_experts, "experts_per_token": per_token}


def _rope(config: HfConfig, default_theta: float = 10_000.0) -> RopeConfig:
    """Reads `rope_theta` and `rope_scaling`, or `rope_parameters`, which contains the fields of both."""
    fields = json_object(config, "rope_scaling") or json_object(config, "rope_parameters")
    if any(isinstance(value, dict) for value in fields.values()):
        raise InputError(
            "config.json: rope_parameters that differ by layer type are not supported for model_type="
            f"{config['model_type']!r}; use a model with one rope for all layers"
        )
    outer = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    # The top-level field overrides the one in rope_scaling, as in transformers.
    original = {name: config[name] for name in ("original_max_position_embeddings",) if config.get(name) is not None}
    max_positions = positive_int(config, "max_position_embeddings")
    return parse_rope({**outer, **fields, **original}, max_positions=max_positions, default_theta=default_theta)


def _ropes_by_layer_type(config: HfConfig) -> tuple[RopeConfig, RopeConfig]:
    """Returns the ropes of full-attention layers and of windowed layers.

    Reads `rope_theta`, `rope_scaling` and `rope_local_base_freq`, or `rope_parameters` with an object per layer type.
    """
    by_type = json_object(config, "rope_parameters")
    # transformers 5.0 also wrote these two next to the objects, where its models do not read them.
    known = {FULL, SLIDING, "rope_theta", "rope_type"} if FULL in by_type else {FULL, SLIDING}
    if extra := sorted(set(by_type) - known):
        raise InputError(
            f"config.json: rope_parameters of model_type={config['model_type']!r} has {extra[0]!r}, expected "
            f"only an object for {FULL!r} and one for {SLIDING!r}"
        )
    partial = {"partial_rotary_factor": config.get("partial_rotary_factor")}
    scaling = json_object(config, "rope_scaling")
    whole = {**partial, "rope_theta": config.get("rope_theta"), **json_object(by_type, FULL), **scaling}
    windowed = {**partial, "rope_theta": config.get("rope_local_base_freq"), **json_object(by_type, SLIDING)}
    max_positions = positive_int(config, "max_position_embeddings")
    return (
        parse_rope(whole, max_positions=max_positions, default_theta=1_000_000.0),
        parse_rope(windowed, max_positions=max_positions, default_theta=10_000.0),
    )


def _windows(config: HfConfig, has_window: Callable[[int], bool], window: int | None) -> tuple[int | None, ...]:
    """Returns each layer's window from `layer_types`, or from the family's pattern if `layer_types` is missing."""
    types = _layer_types(config)
    if types is None:
        types = [SLIDING if has_window(layer) else FULL for layer in range(read_num_layers(config))]
    if SLIDING not in types:
        return ()
    if window is None:
        raise InputError(
            f"config.json: layers have the type {SLIDING!r}, but sliding_window is null or use_sliding_window is "
            f"false; set a window in tokens and use_sliding_window to true, or every entry of layer_types to {FULL!r}"
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def _uniform_windows(config: HfConfig, window: int | None) -> tuple[int | None, ...]:
    """Returns the same window for every layer: transformers ignores `layer_types` in these families."""
    types, expected = _layer_types(config), FULL if window is None else SLIDING
    if types is not None and set(types) != {expected}:
        raise InputError(
            f"config.json: layer_types={types} is not supported for model_type={config['model_type']!r} with "
            f"sliding_window={window}; give every layer the type {expected!r}"
        )
    return () if window is None else (window,) * read_num_layers(config)


def _qwen_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Returns each layer's window; by default, layers from `max_window_layers` on have one if `use_sliding_window`."""
    window = _sliding_window(config) if boolean(config, "use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise InputError(f"config.json: max_window_layers must be an integer of at least 0, got {first!r}; correct it")
    return _windows(config, lambda layer: window is not None and layer >= first, window)


def _sliding_window(config: HfConfig) -> int | None:
    return nullable_field(positive_int, config, "sliding_window", default=4096)


def _layer_types(config: HfConfig) -> Sequence[str] | None:
    types, num_layers = config.get("layer_types"), read_num_layers(config)
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise InputError(f"config.json: layer_types must have {num_layers} entries, got {types!r}; correct it")
    if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise InputError(
            f"config.json: layer_types has {unknown[0]!r}, expected {FULL} or {SLIDING}; use a model with these types"
        )
    return types
