"""The command `grpo settings`."""

from __future__ import annotations

import re
import textwrap
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import to_jsonable_python

from app.commands.command_support import print_notices, print_result
from app.commands.options import AsJson
from settings import InputError
from settings.loading.fields import FIELDS, suggest_fields
from settings.loading.synonyms import ALIASES

BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
NAMES = {int: "integer", float: "number", bool: "boolean", str: "text", type(None): "null", JsonValue: "any value"}


def settings(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A setting, a section, the start of a name, a setting of TRL or verl, or any word.",
            autocompletion=lambda: list(FIELDS),
        ),
    ] = "",
    as_json: AsJson = False,
) -> None:
    """List settings with their type, default and meaning."""
    described = {field: describe_field(FIELDS[field]) for field in _find_settings(name)}
    texts = [_format_setting(field, **parts) for field, parts in described.items()]
    for field, parts in described.items():
        parts["default"] = to_jsonable_python(FIELDS[field].default)
    print_result(described, as_json=as_json, text="\n\n".join(texts))


def _find_settings(name: str) -> list[str]:
    """Returns the settings whose names begin with `name`, or else those with a similar name here, in TRL or in verl.

    If there are none, returns the settings that mention it.
    """
    starts = [name] if any(field.startswith(name) for field in FIELDS) else [*ALIASES.get(name, ())]
    if not starts:
        same_ending = [field for field in FIELDS if field.endswith(f".{name}")]
        suggested, explanation = suggest_fields(name)
        starts = [*same_ending, *(field for other in suggested for field in ALIASES.get(other, (other,)))]
        if not starts:
            if found := [field for field in FIELDS if _mentions(field, name)]:
                return found
            raise InputError(f"unknown setting {name}{explanation}")
        if not {*same_ending}.issuperset(suggested):
            print_notices([explanation.removeprefix("; ")])
    return [field for field in FIELDS if field.startswith(tuple(starts))]


def _mentions(field: str, word: str) -> bool:
    """Returns whether a setting's name or meaning contains a word that starts with `word`."""
    parts = re.split(r"[\W_]+", f"{field} {FIELDS[field].description}".lower())
    return any(part.startswith(word.lower()) for part in parts)


def _format_setting(name: str, type: str, default: str, meaning: str) -> str:
    head = f"{name}: {type}  [default: {default}]\n"
    body = textwrap.fill(meaning, width=80, initial_indent="    ", subsequent_indent="    ")
    return (head + body).replace("`", "")


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
