"""Typed access to the fields of `config.json`, including its rope; missing or malformed fields raise InputError."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from app.model.architecture import RopeConfig
from settings.errors import InputError

HfConfig = Mapping[str, Any]
"""A parsed `config.json`, or an object inside it."""

MAX_INT = 2**30
"""The upper limit of sizes and positions, which are int32 on devices."""

MAX_LAYERS = 10_000
"""The upper limit of the number of layers, since each layer is traced and described separately."""

T = TypeVar("T")


def positive_int(fields: HfConfig, name: str, default: int | None = None, *, limit: int = MAX_INT) -> int:
    expected = f"a positive integer below {limit:,}"
    return _checked(fields, name, default, expected, lambda value: type(value) is int and 0 < value < limit)


def read_num_layers(fields: HfConfig) -> int:
    return positive_int(fields, "num_hidden_layers", limit=MAX_LAYERS + 1)


def positive_float(fields: HfConfig, name: str, default: float | None = None) -> float:
    kinds, expected = (int, float), "a positive number"
    return float(_checked(fields, name, default, expected, lambda value: type(value) in kinds and 0 < value < math.inf))


def boolean(fields: HfConfig, name: str, *, default: bool = False) -> bool:
    return _checked(fields, name, default, "true or false", lambda value: isinstance(value, bool))


def _checked(fields: HfConfig, name: str, default: Any, expected: str, is_valid: Callable[[Any], bool]) -> Any:
    """Returns the field's value; null counts as missing, since transformers writes null for derived values."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json: {name} is missing; use the config.json that was saved with the weights")
    if not is_valid(value):
        raise InputError(f"config.json: {name} must be {expected}, got {value!r:.80}; use the original config.json")
    return value


def json_object(fields: HfConfig, name: str) -> HfConfig:
    """Returns the object in this field; an empty one if the field is missing or null."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {name} must be an object, got {value!r}; use the original config.json")
    return value


def nullable_field(read: Callable[[HfConfig, str], T], fields: HfConfig, name: str, *, default: T | None) -> T | None:
    """Returns the field's value as parsed by `read`, None if it is null, and `default` if it is missing."""
    if name not in fields:
        return default
    return None if fields[name] is None else read(fields, name)


def parse_rope(fields: HfConfig, *, max_positions: int, default_theta: float = 10_000.0) -> RopeConfig:
    """Parses the rope from an object with `rope_theta`, `rope_type` and the fields of that type.

    Args:
        max_positions: the original context length of a `llama3` rope if the object does not contain it.

    Raises:
        InputError: the type is not supported, or fields are missing or contradictory.
    """
    partial = fields.get("partial_rotary_factor")
    if partial not in (None, 1):
        raise InputError(f"config.json: partial_rotary_factor={partial!r} is not supported; use a model with factor 1")
    kind = fields.get("rope_type", fields.get("type", "default"))
    theta = positive_float(fields, "rope_theta", default_theta)
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, kind, positive_float(fields, "factor"))
    if kind != "llama3":
        raise InputError(
            f"config.json: rope_type={kind!r} is not supported; use a model with default, linear or llama3"
        )
    rope = RopeConfig(
        theta=theta,
        rope_type=kind,
        factor=positive_float(fields, "factor"),
        low_frequency_factor=positive_float(fields, "low_freq_factor"),
        high_frequency_factor=positive_float(fields, "high_freq_factor"),
        original_max_positions=positive_int(fields, "original_max_position_embeddings", max_positions),
    )
    if rope.high_frequency_factor <= rope.low_frequency_factor:
        raise InputError(
            f"config.json: high_freq_factor={rope.high_frequency_factor} must exceed "
            f"low_freq_factor={rope.low_frequency_factor}; use the model's original config.json"
        )
    return rope
