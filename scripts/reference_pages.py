"""Writes the generated pages of sops/reference/: all settings from the schema, and all metrics from their registry.

python scripts/reference_pages.py
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, JsonValue
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from app.report.metric_registry import metrics_page
from settings.loading.fields import FIELDS

REFERENCE = Path(__file__).resolve().parents[1] / "sops" / "reference"

BOUNDS = {annotated_types.Ge: ("≥", "ge"), annotated_types.Gt: (">", "gt"), annotated_types.Le: ("≤", "le")}
BOUNDS[annotated_types.Lt] = ("<", "lt")
NAMES = {int: "integer", float: "number", bool: "boolean", str: "text", type(None): "null", JsonValue: "any value"}


def settings_page() -> str:
    """Returns the page of all settings: name, type, default and meaning, one table for each section."""
    lines = ["# Settings", "", "Generated from `settings/schema/` by `python scripts/reference_pages.py`.", ""]
    section = None
    for name, field in FIELDS.items():
        if (head := name.split(".")[0]) != section:
            section = head
            lines += ["", f"## `{section}`", "", "| setting | type | default | meaning |", "|---|---|---|---|"]
        cells = (
            f"`{name}`",
            _type_text(field.annotation, field),
            _default_text(field),
            " ".join((field.description or "").split()),
        )
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


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
    bounds = []
    for item in metadata:
        for kind, (sign, attribute) in BOUNDS.items():
            if isinstance(item, kind):
                bounds.append(f"{sign} {getattr(item, attribute)}")
    return f" {' and '.join(bounds)}" if bounds else ""


def _default_text(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        return "required"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    if isinstance(default, tuple):
        return f"`[{', '.join(str(getattr(item, 'name', item)) for item in default)}]`"
    return f"`{default}`"


PAGES = {"settings.md": settings_page, "metrics.md": metrics_page}


def main() -> None:
    for name, page in PAGES.items():
        (REFERENCE / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
