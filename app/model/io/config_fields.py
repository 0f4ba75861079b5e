"""Typed access to the fields of a `config.json`; a missing or malformed field raises an InputError that names it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from settings.errors import InputError

HfConfig = Mapping[str, Any]
"""A parsed `config.json`, or an object inside it."""

MAX_INT = 2**30
"""The upper limit of sizes and positions, which are int32 on devices."""

MAX_LAYERS = 10_000
"""The upper limit of the number of layers, each of which is traced and described on its own."""

T = TypeVar("T")


def positive_int(fields: HfConfig, name: str, default: int | None = None, *, limit: int = MAX_INT) -> int:
    value = _required_field(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < limit:
        raise InputError(f"config.json: {name} must be a positive integer below {limit:,}, got {value!r:.80}")
    return value


def read_num_layers(fields: HfConfig) -> int:
    return positive_int(fields, "num_hidden_layers", limit=MAX_LAYERS + 1)


def positive_float(fields: HfConfig, name: str, default: float | None = None) -> float:
    value = _required_field(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InputError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def boolean(fields: HfConfig, name: str, *, default: bool = False) -> bool:
    value = _required_field(fields, name, default)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def json_object(fields: HfConfig, name: str) -> HfConfig:
    """Returns the object in this field; an empty one if the field is missing or null."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {name} must be an object, got {value!r}")
    return value


def nullable_field(read: Callable[[HfConfig, str], T], fields: HfConfig, name: str, *, default: T | None) -> T | None:
    """Returns the field's value, None if it is null, and `default` if it is missing."""
    if name not in fields:
        return default
    return None if fields[name] is None else read(fields, name)


def _required_field(fields: HfConfig, name: str, default: Any) -> Any:
    """Returns the field's value; null counts as missing, since transformers writes null for derived values."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json: {name} is missing")
    return value
