"""The dotted names of all settings, and suggestions for misspelled names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import SequenceMatcher, get_close_matches
from functools import reduce
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from settings.loading.synonyms import ALIASES, VERL_ROOT, explain_removal, find_synonyms
from settings.loading.yaml_file import YamlNode
from settings.schema.data import DataSourceSettings
from settings.schema.reward import RewardFunctionSettings
from settings.schema.settings import Settings

MIN_SIMILARITY = 0.7
"""Minimum similarity (difflib's ratio) at which a name is suggested."""
MIN_FIELD_SIMILARITY = 0.8
"""Minimum similarity at which a setting is suggested; it is higher because unrelated settings look alike."""


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
ITEM_KEYS: dict[str, Iterable[str]] = {
    "reward.functions": RewardFunctionSettings.model_fields,
    "data.source": DataSourceSettings.model_fields,
}
"""Maps a field that is a list of mappings to the keys allowed in these mappings."""


def value_of(settings: Settings, field: str) -> Any:
    """Returns the value of the setting with this dotted name."""
    return reduce(getattr, field.split("."), settings)


def is_text(field: str) -> bool:
    """Returns whether a field takes any string, so that an unquoted value such as `1e3` stays text."""
    annotation = FIELDS[field].annotation
    alternatives = (annotation, *get_args(annotation))
    return str in [getattr(kind, "__origin__", kind) for kind in alternatives]  # Annotated[str, ...] is text


def flatten(section: YamlNode, *, prefix: str = "") -> Iterator[tuple[str, YamlNode]]:
    """Yields the dotted name and value of everything in a settings file; empty sections are skipped."""
    assert isinstance(section.value, dict)
    for key, node in section.value.items():
        name = prefix + key
        if name not in FIELDS and isinstance(node.value, dict) and (node.value or name in SECTIONS):
            yield from flatten(node, prefix=f"{name}.")
        elif name not in SECTIONS or node.value is not None:
            yield name, node


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a mapping with dotted names as nested mappings, such as `{"a": {"b": 1}}` for `{"a.b": 1}`."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *sections, last = name.split(".")
        reduce(lambda section, key: section.setdefault(key, {}), sections, tree)[last] = value
    return tree


def suggest_fields(unknown: str, *, show: Callable[[str], str] = str) -> tuple[list[str], str]:
    """Returns the settings that an unknown name may stand for, and the end of an error message that suggests them.

    Args:
        unknown: a dotted or flat name, which may be misspelled or belong to another program.
        show: formats a setting's name in the message, for example as its environment variable.
    """
    unknown = unknown.lower().replace("-", "_").removeprefix(VERL_ROOT)
    if (removal := explain_removal(unknown)) is not None:
        return [], f"; it no longer exists: {removal}"
    last = unknown.rpartition(".")[2]
    near = _nearest_fields(unknown)
    synonyms, is_exact = find_synonyms(unknown, SECTIONS)
    if synonyms and (is_exact or last not in [name.rpartition(".")[2] for name in near]):
        near = [field for synonym in synonyms for field in synonym.fields]
        # A name that differs only in its section, such as TRL's `top_p`, needs no explanation.
        if [name.rpartition(".")[2] for name in near] != [last]:
            here = {
                synonym: f"is {' and '.join(map(show, synonym.fields))}" if synonym.fields else "has no counterpart"
                for synonym in synonyms
            }
            meanings = [f"{one.title} {text} here{one.remark and f': {one.remark}'}" for one, text in here.items()]
            return near, f"; {' and '.join(meanings)}"
    section = unknown.partition(".")[0]
    overview = f"`grpo settings {section}`" if section in SECTIONS else "`grpo settings`"
    return near, did_you_mean([show(name) for name in near]) or f"; {overview} lists the settings"


def _nearest_fields(unknown: str) -> list[str]:
    """Returns the fields, sections or aliases most similar to `unknown`; none if more than four are equally similar."""
    sections = [section for section in SECTIONS if ("." in section) == ("." in unknown)]
    known = [(name, name) for name in (*FIELDS, *sections, *ALIASES)]
    known += [(name.rpartition(".")[2], name) for name in FIELDS]
    scores = [(_similarity(unknown, spelling), name) for spelling, name in known]
    best = max(score for score, _ in scores)
    nearest = sorted({name for score, name in scores if score == best})
    return nearest if best >= MIN_FIELD_SIMILARITY and len(nearest) <= 4 else []


def nearest_names(unknown: str, names: Iterable[str]) -> list[str]:
    """Returns a list with the most similar name, or an empty list if none is similar enough."""
    return get_close_matches(unknown.lower(), [*names], n=1, cutoff=MIN_SIMILARITY)


def _similarity(unknown: str, known: str) -> float:
    """Returns the similarity of two names, from 0 to 1. It is low if only the section or only the last part agrees."""
    section, dot, name = unknown.rpartition(".")
    known_section, known_dot, known_name = known.rpartition(".")
    if not (dot and known_dot):
        return _ratio(unknown, known)
    in_section, in_name = _ratio(section, known_section), _ratio(name, known_name)
    words, known_words = set(name.split("_")), set(known_name.split("_"))
    # The same section and, for example, `steps` for `every_steps`.
    if section == known_section and (in_name >= MIN_SIMILARITY or words <= known_words or known_words <= words):
        return max(in_name, MIN_FIELD_SIMILARITY)
    if in_name == 1 and (in_section >= 0.5 or section not in SECTIONS):
        return MIN_FIELD_SIMILARITY + (1 - MIN_FIELD_SIMILARITY) * in_section
    return min(in_section, in_name)


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a, b).ratio()


def did_you_mean(names: list[str]) -> str:
    """Returns the end of an error message, such as `; did you mean a or b?`; an empty string without names."""
    return f"; did you mean {' or '.join(names)}?" if names else ""
