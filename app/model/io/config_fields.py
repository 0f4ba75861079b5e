"""Typed fields of a `config.json`. What is missing or malformed is an InputError that names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from settings.errors import InputError

Config = Mapping[str, Any]
"""A parsed `config.json`, or an object inside it."""

MAX_INT = 2**30
"""Sizes and positions are int32 on the devices, and no real one comes near."""

T = TypeVar("T")


def positive_int(fields: Config, name: str, default: int | None = None) -> int:
    value = _present(fields, name, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < MAX_INT:
        raise InputError(f"config.json: {name} must be a positive integer below 2**30, got {value!r}")
    return value


def positive_float(fields: Config, name: str, default: float | None = None) -> float:
    value = _present(fields, name, default)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise InputError(f"config.json: {name} must be a positive number, got {value!r}")
    return float(value)


def boolean(fields: Config, name: str, *, default: bool = False) -> bool:
    value = _present(fields, name, default)
    if not isinstance(value, bool):
        raise InputError(f"config.json: {name} must be true or false, got {value!r}")
    return value


def json_object(fields: Config, name: str) -> Config:
    """The object under that name; empty where there is none."""
    value = fields.get(name) or {}
    if not isinstance(value, Mapping):
        raise InputError(f"config.json: {name} must be an object, got {value!r}")
    return value


def unless_null(read: Callable[[Config, str], T], fields: Config, name: str, *, absent: T | None) -> T | None:
    """None where null switches the field off, `absent` where the field is not there at all."""
    if name not in fields:
        return absent
    return None if fields[name] is None else read(fields, name)


def _present(fields: Config, name: str, default: Any) -> Any:
    """The field's value; null counts as absent, as transformers writes null for "derive it"."""
    value = fields.get(name)
    value = default if value is None else value
    if value is None:
        raise InputError(f"config.json: {name} is missing")
    return value
