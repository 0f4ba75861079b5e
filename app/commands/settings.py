"""`grpo settings`."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer
from pydantic_core import to_jsonable_python

from app.commands.command_support import print_notices, print_result
from app.commands.options import AsJson
from settings import InputError
from settings.loading.descriptions import describe_field
from settings.loading.fields import FIELDS, suggest_fields
from settings.loading.synonyms import ALIASES


def settings(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A setting, a section, the start of a name, or what another program calls a setting.",
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
    """Returns the settings that begin with `name`, or else those that it stands for, in the order of the schema."""
    starts = [name] if any(field.startswith(name) for field in FIELDS) else [*ALIASES.get(name, ())]
    if not starts:
        same_ending = [field for field in FIELDS if field.endswith(f".{name}")]
        suggested, explanation = suggest_fields(name)
        starts = [*same_ending, *(field for other in suggested for field in ALIASES.get(other, (other,)))]
        if not starts:
            raise InputError(f"unknown setting {name}{explanation}")
        if not {*same_ending}.issuperset(suggested):
            print_notices([explanation.removeprefix("; ")])
    return [field for field in FIELDS if field.startswith(tuple(starts))]


def _format_setting(name: str, type: str, default: str, meaning: str) -> str:
    head = f"{name}: {type}  [default: {default}]\n"
    body = textwrap.fill(meaning, width=80, initial_indent="    ", subsequent_indent="    ")
    return (head + body).replace("`", "")
