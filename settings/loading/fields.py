"""All settings by dotted name, and suggestions for misspelled names."""

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
"""Minimum similarity (difflib's ratio) of a suggested name."""


def _iter_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        yield prefix + name, info
        if _is_section(info):
            yield from _iter_fields(info.annotation, f"{prefix}{name}.")  # pyright: ignore[reportArgumentType]


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


FIELDS: dict[str, FieldInfo] = {name: info for name, info in _iter_fields(Settings) if not _is_section(info)}
"""Maps a dotted name, such as `rollout.group_size`, to its field, in the order of the schema."""
SECTIONS: frozenset[str] = frozenset(name for name, info in _iter_fields(Settings) if _is_section(info))
"""Dotted names of the sections, such as `rollout` and `score.policy`."""
ITEM_KEYS: dict[str, Iterable[str]] = {"reward.functions": RewardFunctionSettings.model_fields}
"""Maps a field that is a list of mappings to the keys allowed in these mappings."""


def value_of(settings: Settings, field: str) -> Any:
    """Returns the value of a setting by its dotted name."""
    return reduce(getattr, field.split("."), settings)


def is_text(field: str) -> bool:
    """Returns whether a field is free text, so that an unquoted scalar keeps its spelling."""
    annotation = FIELDS[field].annotation
    alternatives = (annotation, *get_args(annotation))
    return str in [getattr(kind, "__origin__", kind) for kind in alternatives]  # Annotated[str, ...] is text


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested mappings: `{"a": {"b": 1}}` for `{"a.b": 1}`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        reduce(lambda section, key: section.setdefault(key, {}), sections, tree)[last] = value
    return tree


def nearest_fields(unknown: str) -> list[str]:
    """Returns the names most similar to `unknown`: dotted names, sections and aliases."""
    sections = [section for section in SECTIONS if ("." in section) == ("." in unknown)]
    known = [(name, name) for name in (*FIELDS, *sections, *ALIASES)]
    known += [(name.rpartition(".")[2], name) for name in FIELDS]
    return _nearest(unknown, known)


def nearest_names(unknown: str, names: Iterable[str]) -> list[str]:
    return _nearest(unknown, [(name, name) for name in names])


def _nearest(unknown: str, known: list[tuple[str, str]]) -> list[str]:
    # The whole name counts a little more than a field's name without its section.
    scores = [(_similarity(unknown.lower(), spelling) - 0.05 * (spelling != name), name) for spelling, name in known]
    best = max(score for score, _ in scores)
    return sorted({name for score, name in scores if score == best}) if best >= MIN_SIMILARITY else []


def _similarity(unknown: str, known: str) -> float:
    """Returns the similarity of two names. Section and field count equally, whatever their lengths."""
    section, dot, name = unknown.rpartition(".")
    known_section, known_dot, known_name = known.rpartition(".")
    if dot and known_dot:
        return (_ratio(section, known_section) + _ratio(name, known_name)) / 2
    return _ratio(unknown, known)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def did_you_mean(names: list[str]) -> str:
    """Returns the end of an error message: `; did you mean a or b?`, or an empty string."""
    return f"; did you mean {' or '.join(names)}?" if names else ""
