"""What a Hugging Face `config.json` says about the network, checked and reduced to what the decoder needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float32

from settings.errors import InputError

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
"""`model_type` -> the `architectures` entry that goes with it."""

DEFAULT_ROPE_THETA = 10_000.0
DEFAULT_NORM_EPSILON = 1e-6


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding over the whole head ("two halves" pairing)."""

    theta: float
    kind: str = "default"
    """`default`, `linear` or `llama3`."""
    factor: float = 1.0
    """How many times longer than in pre-training the context became; unused by `default`."""
    low_frequency_factor: float = 1.0
    """`llama3` only, as the two below."""
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True)
class Architecture:
    """Sizes and switches of one decoder-only transformer. Hashable, so it can be a static argument."""

    family: str
    """`llama` or `qwen2`."""
    vocab_size: int
    num_layers: int
    model_dim: int
    mlp_dim: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    norm_epsilon: float
    max_positions: int
    tied_embeddings: bool
    """The LM head is the embedding matrix; the checkpoint then holds no `lm_head.weight`."""
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool


def architecture_from_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture that a parsed `config.json` describes.

    Absent optional fields take transformers' defaults; sizes have none and must be there.

    Raises: InputError for remote code, an unknown family, or a missing, malformed or contradictory field.
    """
    family = _family(config)
    num_query_heads = _positive_int(config, "num_attention_heads")
    num_kv_heads = _positive_int(config, "num_key_value_heads", default=num_query_heads)
    if num_query_heads % num_kv_heads:
        raise InputError(
            f"config.json: num_attention_heads={num_query_heads} is not a multiple of "
            f"num_key_value_heads={num_kv_heads}, so query heads cannot share key/value heads evenly"
        )
    max_positions = _positive_int(config, "max_position_embeddings")
    attention_bias = family == "llama" and _boolean(config, "attention_bias")
    return Architecture(
        family=family,
        vocab_size=_positive_int(config, "vocab_size"),
        num_layers=_positive_int(config, "num_hidden_layers"),
        model_dim=_positive_int(config, "hidden_size"),
        mlp_dim=_positive_int(config, "intermediate_size"),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(config, num_query_heads),
        rope=_rope(config, max_positions),
        norm_epsilon=_positive_float(config, "rms_norm_eps", default=DEFAULT_NORM_EPSILON),
        max_positions=max_positions,
        tied_embeddings=_boolean(config, "tie_word_embeddings"),
        qkv_bias=family == "qwen2" or attention_bias,
        attention_output_bias=attention_bias,
        mlp_bias=family == "llama" and _boolean(config, "mlp_bias"),
    )


def rope_frequencies(rope: Rope, head_dim: int) -> Float32[np.ndarray, " H/2"]:
    """Radians per position of each rotated pair.

        default   f_i = theta^(-2i / H)
        linear    f_i / factor
        llama3    f_i              where the wavelength 2 pi / f_i < original / high
                  f_i / factor     where it is > original / low
                  (1 - s) f_i / factor + s f_i   between, s = (original f_i / (2 pi) - low) / (high - low)

    Raises: InputError for another kind.

    Source: Su et al. 2021 (RoFormer) eq. 15; Chen et al. 2023 (position interpolation);
    Llama 3.1 reference code, `apply_scaling`.
    """
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # float32 numpy powers differ in the last bit from those the models were trained with (torch);
    # rounding a float64 power does not.
    powers = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)
    frequencies = np.float32(1) / powers
    if rope.kind == "default":
        return frequencies
    if rope.kind == "linear":
        return frequencies / np.float32(rope.factor)
    if rope.kind == "llama3":
        turns = rope.original_max_positions * frequencies / (2 * np.pi)
        low, high = rope.low_frequency_factor, rope.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return ((1 - kept) * frequencies / rope.factor + kept * frequencies).astype(np.float32)
    raise _unknown_rope(rope.kind)


def _family(config: Mapping[str, Any]) -> str:
    if config.get("auto_map"):
        raise InputError(
            "config.json has `auto_map`: this model brings its own Python code, which is never run; "
            f"supported model types: {', '.join(FAMILIES)}"
        )
    family = config.get("model_type")
    if family not in FAMILIES:
        raise InputError(f"config.json: model_type={family!r} is not supported; supported: {', '.join(FAMILIES)}")
    declared = config.get("architectures") or [FAMILIES[family]]
    if list(declared) != [FAMILIES[family]]:
        raise InputError(
            f"config.json: architectures={declared!r} is not supported for model_type={family!r}; "
            f"supported: {', '.join(FAMILIES.values())}"
        )
    if config.get("quantization_config"):
        raise InputError("config.json has `quantization_config`: quantised weights cannot be trained; use the original")
    if config.get("use_sliding_window") or "sliding_attention" in (config.get("layer_types") or ()):
        raise InputError("config.json: use_sliding_window=true is not supported yet; use a full-attention model")
    if config.get("hidden_act", "silu") != "silu":
        raise InputError(f"config.json: hidden_act={config['hidden_act']!r} is not supported; supported: 'silu'")
    return family


def _head_dim(config: Mapping[str, Any], num_query_heads: int) -> int:
    model_dim = _positive_int(config, "hidden_size")
    if config.get("head_dim") is None and model_dim % num_query_heads:
        raise InputError(
            f"config.json: hidden_size={model_dim} is not a multiple of "
            f"num_attention_heads={num_query_heads} and there is no head_dim"
        )
    head_dim = _positive_int(config, "head_dim", default=model_dim // num_query_heads)
    if head_dim % 2:
        raise InputError(f"config.json: head_dim={head_dim} is odd; rotary embedding turns pairs, so it must be even")
    return head_dim


def _rope(config: Mapping[str, Any], max_positions: int) -> Rope:
    """Both spellings: `rope_theta` + `rope_scaling`, and `rope_parameters`, which holds both."""
    fields = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(fields, Mapping):
        raise InputError(f"config.json: rope parameters must be an object, got {fields!r}")
    if any(isinstance(value, Mapping) for value in fields.values()):
        raise InputError("config.json: rope_parameters that differ by layer type are not supported")
    fields = {"rope_theta": config.get("rope_theta"), **fields}
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise InputError(f"config.json: partial_rotary_factor={partial!r} is not supported; only 1")
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = _positive_float(fields, "rope_theta", default=DEFAULT_ROPE_THETA)
    if kind == "default":
        return Rope(theta=theta)
    if kind == "linear":
        return Rope(theta=theta, kind=kind, factor=_positive_float(fields, "factor"))
    if kind != "llama3":
        raise _unknown_rope(kind)
    # Where it stands beside rope_scaling it wins, as in transformers.
    outer = {"original_max_position_embeddings": config.get("original_max_position_embeddings")}
    inner = _positive_int(fields, "original_max_position_embeddings", default=max_positions)
    rope = Rope(
        theta=theta,
        kind=kind,
        factor=_positive_float(fields, "factor"),
        low_frequency_factor=_positive_float(fields, "low_freq_factor"),
        high_frequency_factor=_positive_float(fields, "high_freq_factor"),
        original_max_positions=_positive_int(outer, "original_max_position_embeddings", default=inner),
    )
    if rope.high_frequency_factor <= rope.low_frequency_factor:
        raise InputError(
            f"config.json: high_freq_factor={rope.high_frequency_factor} must exceed "
            f"low_freq_factor={rope.low_frequency_factor}"
        )
    return rope


def _unknown_rope(kind: Any) -> InputError:
    return InputError(f"config.json: rope type {kind!r} is not supported; supported: default, linear, llama3")


def _positive_int(fields: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = _present(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value


def _positive_float(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    value = _present(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InputError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def _boolean(fields: Mapping[str, Any], name: str) -> bool:
    value = _present(fields, name, default=False)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def _present(fields: Mapping[str, Any], name: str, default: Any) -> Any:
    """The field's value; null counts as absent, as transformers writes null for "derive it"."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json: {name} is missing")
    return value
