"""Describes a setting for people: its type, default and meaning."""

from __future__ import annotations

import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
NAMES = {int: "integer", float: "number", bool: "boolean", str: "text", type(None): "null", JsonValue: "any value"}


def describe_field(field: FieldInfo) -> dict[str, str]:
    """Returns `type`, `default` and `meaning` of a setting as Markdown."""
    return {
        "type": _type_text(field.annotation, field),
        "default": _default_text(field),
        "meaning": " ".join((field.description or "").split()),
    }


def _type_text(annotation: Any, field: FieldInfo | None = None) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(arguments[0]) + _bounds_text(arguments[1:])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        options = " or ".join(_type_text(argument) for argument in arguments if argument is not type(None))
        text = options + (_bounds_text(field.metadata) if field else "")
        return f"{text}, or null" if type(None) in arguments else text
    if origin is tuple:
        return f"list of {_type_text(arguments[0])}"
    if origin is dict:
        return f"mapping to {_type_text(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"mapping of {', '.join(annotation.model_fields)}"
    return NAMES[annotation] + (_bounds_text(field.metadata) if field else "")


def _bounds_text(metadata: Any) -> str:
    bounds = [
        f"{sign} {getattr(item, bound)}" for item in metadata for bound, sign in BOUNDS.items() if hasattr(item, bound)
    ]
    return f" {' and '.join(bounds)}" if bounds else ""


def _default_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, tuple):
        return f"`[{', '.join(str(getattr(item, 'name', item)) for item in default)}]`"
    return f"`{default}`"
