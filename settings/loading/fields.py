"""The table of all settings by dotted name, and the nearest names to a wrong one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import SequenceMatcher
from functools import reduce
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from settings.loading.aliases import ALIASES
from settings.schema.reward import RewardFunctionSettings
from settings.schema.settings import Settings

MIN_SIMILARITY = 0.7
"""Similarity (difflib's ratio) from which a known name is offered for an unknown one."""


def _iter_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        if _is_section(info):
            yield from _iter_fields(info.annotation, f"{prefix}{name}.")  # pyright: ignore[reportArgumentType]


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


FIELDS: dict[str, FieldInfo] = {name: info for name, info in _iter_fields(Settings) if not _is_section(info)}
"""Dotted name -> field, in the order of the schema: `rollout.group_size`."""
SECTIONS: frozenset[str] = frozenset(name for name, info in _iter_fields(Settings) if _is_section(info))
"""Dotted names of the sections: `rollout`, `score.policy`."""
ITEM_KEYS: dict[str, Iterable[str]] = {"reward.functions": RewardFunctionSettings.model_fields}
"""Keys of the mappings that are listed in a field."""


def value_of(settings: Settings, field: str) -> Any:
    """The value under a dotted name."""
    return reduce(getattr, field.split("."), settings)


def is_text(field: str) -> bool:
    """Whether the field is free text, which keeps an unquoted scalar as it was written."""
    annotation = FIELDS[field].annotation
    alternatives = (annotation, *get_args(annotation))
    return str in [getattr(kind, "__origin__", kind) for kind in alternatives]  # Annotated[str, ...] is text


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """`{"a.b": 1}` as `{"a": {"b": 1}}`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        reduce(lambda section, key: section.setdefault(key, {}), sections, tree)[last] = value
    return tree


def nearest_fields(unknown: str) -> list[str]:
    """The names most like `unknown`: dotted, historic, or a bare field name given in full."""
    sections = [section for section in SECTIONS if ("." in section) == ("." in unknown)]
    known = [(name, name) for name in (*FIELDS, *sections, *ALIASES)]
    known += [(name.rpartition(".")[2], name) for name in FIELDS]
    return _nearest(unknown, known)


def nearest_names(unknown: str, names: Iterable[str]) -> list[str]:
    return _nearest(unknown, [(name, name) for name in names])


def _nearest(unknown: str, known: list[tuple[str, str]]) -> list[str]:
    scores = [(_similarity(unknown.lower(), spelling), name) for spelling, name in known]
    best = max(score for score, _ in scores)
    return sorted({name for score, name in scores if score == best}) if best >= MIN_SIMILARITY else []


def _similarity(unknown: str, known: str) -> float:
    """Of two dotted names, the mean over section and field: a right section must not outvote the field."""
    section, dot, name = unknown.rpartition(".")
    known_section, known_dot, known_name = known.rpartition(".")
    if dot and known_dot:
        return (_ratio(section, known_section) + _ratio(name, known_name)) / 2
    return _ratio(unknown, known)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def did_you_mean(names: list[str]) -> str:
    """The end of an error message: `; did you mean a or b?`, or nothing."""
    return f"; did you mean {' or '.join(names)}?" if names else ""
