"""The model families: what each one's Hugging Face `config.json` says, as an `Architecture`.

Absent optional fields take transformers' defaults; sizes have none and must be there. A field that would
change the network in a way the decoder cannot follow is an InputError, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.model.architecture import Architecture
from app.model.io.config_fields import HfConfig, boolean, json_object, nullable_field, positive_float, positive_int
from app.model.rope import RopeConfig, parse_rope
from settings.errors import InputError

FULL, SLIDING = "full_attention", "sliding_attention"

DEFAULT_NORM_EPSILON = 1e-6

UNSUPPORTED_FIELDS = {
    "quantization_config": "quantised weights cannot be trained; use the original",
    "num_experts": "mixtures of experts are not supported; use a dense model",
    "num_local_experts": "mixtures of experts are not supported; use a dense model",
    "attention_chunk_size": "attention in chunks is not supported; use a model with full or sliding attention",
    "use_bidirectional_attention": "only causal language models can be sampled; use one",
}
"""Fields that no supported family may set, and what is wrong with them."""


class Family(NamedTuple):
    causal_lm: str
    """The `architectures` entry that goes with the `model_type`."""
    parse_config: Callable[[HfConfig], Architecture]
    example: str
    """A text-only checkpoint of the hub."""
    classifier: str | None = None
    """The entry of sequence classification; None where only the end differs."""

    def architecture_name(self, head: str) -> str:
        """The `architectures` entry of a network with this head."""
        if self.classifier is not None and head in SEQUENCE_CLASSIFICATION:
            return self.classifier
        return self.causal_lm.removesuffix(*CAUSAL_LM) + head


CAUSAL_LM = ("ForCausalLM",)
SEQUENCE_CLASSIFICATION = ("ForSequenceClassification",)


def architecture_from_config(config: HfConfig, *, heads: Sequence[str] = CAUSAL_LM) -> Architecture:
    """The architecture that a parsed `config.json` describes.

    Args:
        heads: the kinds of network that will do, as the ends of `architectures` entries.

    Raises: InputError for remote code, an unknown family, a field that cannot be honoured, or a missing,
        malformed or contradictory one.
    """
    if config.get("auto_map"):
        raise InputError(
            "config.json has `auto_map`: this model brings its own Python code, which is never run; "
            f"supported model types: {', '.join(FAMILIES)}"
        )
    model_type = config.get("model_type")
    if "text_config" in config or "vision_config" in config:
        raise _multimodal_error(config)
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise InputError(f"config.json: model_type={model_type!r} is not supported; supported: {', '.join(FAMILIES)}")
    family = FAMILIES[model_type]
    declared = config.get("architectures") or [family.causal_lm]
    supported = [family.architecture_name(head) for head in heads]
    if declared not in [[name] for name in supported]:
        raise InputError(
            f"config.json: architectures={declared!r} is not supported for model_type={model_type!r}; "
            f"supported: {' or '.join(supported)}"
        )
    for field, why in UNSUPPORTED_FIELDS.items():
        if config.get(field):
            raise InputError(f"config.json has `{field}`: {why}")
    return family.parse_config(config)


def llama(config: HfConfig) -> Architecture:
    """Llama 2 and 3, SmolLM2, and whatever else is saved as them."""
    _check_silu_activation(config)
    if config.get("use_sliding_window"):
        raise InputError("config.json: use_sliding_window=true is not supported for model_type='llama'")
    bias = boolean(config, "attention_bias")
    return _architecture(
        config,
        windows=_uniform_windows(config, None),
        qkv_bias=bias,
        attention_output_bias=bias,
        mlp_bias=boolean(config, "mlp_bias"),
    )


def mistral(config: HfConfig) -> Architecture:
    """Llama with the same sliding window on every layer. Source: Jiang et al. 2023."""
    _check_silu_activation(config)
    return _architecture(config, windows=_uniform_windows(config, _sliding_window(config)))


def qwen2(config: HfConfig) -> Architecture:
    """Qwen2 and 2.5: Llama with biases on query, key and value."""
    _check_silu_activation(config)
    return _architecture(config, windows=_qwen_windows(config), qkv_bias=True)


def qwen3(config: HfConfig) -> Architecture:
    """Llama with normed queries and keys. Source: Yang et al. 2025, section 2."""
    _check_silu_activation(config)
    bias = boolean(config, "attention_bias")
    return _architecture(
        config,
        default_head_dim=128,
        windows=_qwen_windows(config),
        qkv_bias=bias,
        attention_output_bias=bias,
        query_key_norms=True,
    )


def gemma2(config: HfConfig) -> Architecture:
    """Capped scores and logits, norms around every part, every other layer with a window.

    Source: Riviere et al. 2024, section 2.
    """
    return _gemma(
        config,
        windows=_windows(config, lambda layer: layer % 2 == 0, _sliding_window(config)),
        attention_soft_cap=nullable_field(positive_float, config, "attn_logit_softcapping", default=50.0),
        logit_soft_cap=nullable_field(positive_float, config, "final_logit_softcapping", default=30.0),
    )


def gemma3_text(config: HfConfig) -> Architecture:
    """Gemma 2 with query and key norms in place of capped scores, and ropes of their own for layers with a window.

    Source: Kamath et al. 2025, section 2.
    """
    if config.get("attn_logit_softcapping") is not None:
        # transformers reads the field and never uses it: nobody can say what such weights were trained with.
        raise InputError("config.json: attn_logit_softcapping is not supported for model_type='gemma3_text'; only null")
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
    "llama": Family("LlamaForCausalLM", llama, "meta-llama/Llama-3.2-1B-Instruct"),
    "mistral": Family("MistralForCausalLM", mistral, "mistralai/Mistral-7B-Instruct-v0.3"),
    "qwen2": Family("Qwen2ForCausalLM", qwen2, "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen3": Family("Qwen3ForCausalLM", qwen3, "Qwen/Qwen3-0.6B"),
    "gemma2": Family("Gemma2ForCausalLM", gemma2, "google/gemma-2-2b-it"),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", gemma3_text, "google/gemma-3-1b-it", classifier="Gemma3TextForSequenceClassification"
    ),
}
"""By `model_type`."""


def _gemma(config: HfConfig, **switches: Any) -> Architecture:
    """What Gemma 2 and 3 share."""
    _check_gemma_activation(config)
    bias = boolean(config, "attention_bias")
    return _architecture(
        config,
        default_head_dim=256,
        tied_by_default=True,
        query_scale=positive_float(config, "query_pre_attn_scalar", default=256) ** -0.5,
        qkv_bias=bias,
        attention_output_bias=bias,
        post_norms=True,
        centered_norms=True,
        activation="gelu_tanh",
        scaled_embeddings=True,
        **switches,
    )


def _architecture(
    config: HfConfig, *, default_head_dim: int | None = None, tied_by_default: bool = False, **switches: Any
) -> Architecture:
    """The sizes, which every family spells alike, and the family's own switches."""
    num_query_heads = positive_int(config, "num_attention_heads")
    num_kv_heads = positive_int(config, "num_key_value_heads", default=num_query_heads)
    if num_query_heads % num_kv_heads:
        raise InputError(
            f"config.json: num_attention_heads={num_query_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}, so query heads cannot share key/value heads evenly"
        )
    if "rope" not in switches:
        switches["rope"] = _rope(config)
    return Architecture(
        family=config["model_type"],
        vocab_size=positive_int(config, "vocab_size"),
        num_layers=positive_int(config, "num_hidden_layers"),
        model_dim=positive_int(config, "hidden_size"),
        mlp_dim=positive_int(config, "intermediate_size"),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, num_query_heads, default_head_dim),
        norm_epsilon=positive_float(config, "rms_norm_eps", default=DEFAULT_NORM_EPSILON),
        max_positions=positive_int(config, "max_position_embeddings"),
        tied_embeddings=boolean(config, "tie_word_embeddings", default=tied_by_default),
        **switches,
    )


def _head_dim(config: HfConfig, num_query_heads: int, default: int | None) -> int:
    model_dim = positive_int(config, "hidden_size")
    if config.get("head_dim") is None and default is None and model_dim % num_query_heads:
        raise InputError(
            f"config.json: hidden_size={model_dim} is not a multiple of "
            f"num_attention_heads={num_query_heads} and there is no head_dim"
        )
    head_dim = positive_int(config, "head_dim", default=default or model_dim // num_query_heads)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim={head_dim} is odd; rotary embedding turns pairs, so it must be even")
    return head_dim


def _rope(config: HfConfig) -> RopeConfig:
    """Both spellings: `rope_theta` + `rope_scaling`, and `rope_parameters`, which holds both."""
    fields = json_object(config, "rope_scaling") or json_object(config, "rope_parameters")
    if any(isinstance(value, dict) for value in fields.values()):
        raise InputError(
            f"config.json: rope_parameters that differ by layer type are not supported for model_type="
            f"{config['model_type']!r}"
        )
    outer = {name: config.get(name) for name in ("rope_theta", "partial_rotary_factor")}
    # Where it stands beside rope_scaling it wins, as in transformers.
    original = {name: config[name] for name in ("original_max_position_embeddings",) if config.get(name) is not None}
    return parse_rope({**outer, **fields, **original}, max_positions=positive_int(config, "max_position_embeddings"))


def _ropes_by_layer_type(config: HfConfig) -> tuple[RopeConfig, RopeConfig]:
    """Of the layers without and with a window.

    Both spellings: `rope_theta` + `rope_scaling` and `rope_local_base_freq`, and `rope_parameters` with an object
    for each layer type.
    """
    by_type = json_object(config, "rope_parameters")
    if extra := sorted(set(by_type) - {FULL, SLIDING}):
        raise InputError(
            f"config.json: rope_parameters of model_type={config['model_type']!r} has {extra[0]!r}; expected "
            f"an object for {FULL!r} and one for {SLIDING!r}"
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
    """Each layer's window: where `layer_types` says so, or the family's own pattern where it is absent."""
    types = _layer_types(config)
    if types is None:
        types = [SLIDING if has_window(layer) else FULL for layer in range(positive_int(config, "num_hidden_layers"))]
    if SLIDING not in types:
        return ()
    if window is None:
        raise InputError(
            f"config.json: layers have {SLIDING!r}, but there is no window: sliding_window is null or "
            "use_sliding_window is false"
        )
    return tuple(window if kind == SLIDING else None for kind in types)


def _uniform_windows(config: HfConfig, window: int | None) -> tuple[int | None, ...]:
    """The same on every layer: the code of these families does not look at `layer_types`."""
    types, expected = _layer_types(config), FULL if window is None else SLIDING
    if types is not None and set(types) != {expected}:
        raise InputError(
            f"config.json: layer_types={types} is not supported for model_type={config['model_type']!r} with "
            f"sliding_window={window}; expected {expected!r} for every layer"
        )
    return () if window is None else (window,) * positive_int(config, "num_hidden_layers")


def _qwen_windows(config: HfConfig) -> tuple[int | None, ...]:
    """Off unless asked for; then on the layers from `max_window_layers` on."""
    window = _sliding_window(config) if boolean(config, "use_sliding_window") else None
    first = config.get("max_window_layers", 28)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        raise InputError(f"config.json: max_window_layers must be an integer of at least 0, got {first!r}")
    return _windows(config, lambda layer: window is not None and layer >= first, window)


def _sliding_window(config: HfConfig) -> int | None:
    return nullable_field(positive_int, config, "sliding_window", default=4096)


def _layer_types(config: HfConfig) -> Sequence[str] | None:
    types, num_layers = config.get("layer_types"), positive_int(config, "num_hidden_layers")
    if types is None:
        return None
    if not isinstance(types, list) or len(types) != num_layers:
        raise InputError(f"config.json: layer_types must list one type for each of {num_layers} layers, got {types!r}")
    if unknown := [kind for kind in types if kind not in (FULL, SLIDING)]:
        raise InputError(
            f"config.json: layer_types has {unknown[0]!r}, which is not supported; supported: {FULL}, {SLIDING}"
        )
    return types


def _check_silu_activation(config: HfConfig) -> None:
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(f"config.json: hidden_act={config['hidden_act']!r} is not supported; supported: 'silu'")


def _check_gemma_activation(config: HfConfig) -> None:
    """`hidden_activation` decides. Old files also say hidden_act="gelu", and mean the same."""
    activation = config.get("hidden_activation") or "gelu_pytorch_tanh"
    if activation != "gelu_pytorch_tanh":
        raise InputError(f"config.json: hidden_activation={activation!r} is not supported; only 'gelu_pytorch_tanh'")
    if config.get("hidden_act") not in (None, "gelu", "gelu_pytorch_tanh"):
        raise InputError(
            f"config.json: hidden_act={config['hidden_act']!r} contradicts hidden_activation={activation!r}"
        )


def _multimodal_error(config: HfConfig) -> InputError:
    inner = config.get("text_config")
    inner_type = inner.get("model_type") if isinstance(inner, dict) else None
    family = FAMILIES.get(inner_type) if isinstance(inner_type, str) else None
    text_only = f" of model_type {inner_type!r}, such as {family.example}" if family else ""
    return InputError(
        f"config.json: model_type={config.get('model_type')!r} wraps a language model together with an image or sound "
        f"encoder, which is not supported; use a text-only checkpoint{text_only}"
    )
