"""Typed fields of a `config.json`. What is missing or malformed is an InputError that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from settings.errors import InputError

HfConfig = Mapping[str, Any]
"""A parsed `config.json`, or an object inside it."""

MAX_INT = 2**30
"""Sizes and positions are int32 on the devices, and no real one comes near."""

T = TypeVar("T")


def positive_int(fields: HfConfig, name: str, default: int | None = None) -> int:
    value = _required_field(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_INT:
        raise InputError(f"config.json: {name} must be a positive integer below 2**30, got {value!r}")
    return value


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
    """The object under that name; empty where there is none."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {name} must be an object, got {value!r}")
    return value


def nullable_field(read: Callable[[HfConfig, str], T], fields: HfConfig, name: str, *, default: T | None) -> T | None:
    """None where null switches the field off, `absent` where the field is not there at all."""
    if name not in fields:
        return default
    return None if fields[name] is None else read(fields, name)


def _required_field(fields: HfConfig, name: str, default: Any) -> Any:
    """The field's value; null counts as absent, as transformers writes null for "derive it"."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json: {name} is missing")
    return value
