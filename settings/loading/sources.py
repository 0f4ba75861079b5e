"""Reads the layers of settings: a YAML file, `--set`, the environment, and command options.

In each layer, a setting may be set only once, by its dotted name or an alias.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from settings.errors import InputError
from settings.loading.config_file import ConfigFile
from settings.loading.fields import FIELDS, SECTIONS, flatten, is_text, suggest_fields
from settings.loading.printing import format_inline
from settings.loading.synonyms import ALIASES, HISTORIC_NAMES
from settings.loading.yaml_file import YamlNode, parse_settings_file, parse_yaml
from settings.secrets import SECRETS

ENV_PREFIX = "GRPO__"
MAX_PROBLEMS = 10
"""Maximum number of problems listed in an error; another program's file may have hundreds of unknown settings."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A field's value and its source."""

    value: Any
    origin: str
    """Provenance: `yaml:FILE:LINE`, `set`, `env:NAME`, a flag such as `--gamma`, or `derived`."""
    given_name: str = ""
    """Name by which the user set it, such as `NUM_PRE_Q`; empty if it is derived."""


Layer = dict[str, SourcedValue]
"""Maps a dotted field to its value and source."""
Flags = Mapping[str, tuple[str, str]]
"""Maps a command option to its field and its text, such as `--gamma` to (`algorithm.gamma`, `0.9`)."""
NO_FLAGS: Flags = {}
Entry = tuple[str, YamlNode, str, str]
"""A name, which may be unknown; its value; its provenance; and the name as the user wrote it, such as `NUM_PRE_Q`."""


def set_options(overrides: Mapping[str, Any], *, prefix: str = "") -> Iterator[str]:
    """Yields each value as `NAME=VALUE` for `--set`; keys are dotted names, or sections whose values are mappings."""
    for key, value in overrides.items():
        name = f"{prefix}{key}"
        if name in SECTIONS and isinstance(value, Mapping):
            yield from set_options(value, prefix=f"{name}.")
            continue
        try:
            yield f"{name}={format_inline(os.fspath(value) if isinstance(value, os.PathLike) else value)}"
        except yaml.YAMLError:
            raise InputError(
                f"{name}: expected None, a bool, a number, a string, or a list or dict of these, got {value!r:.80} "
                f"of type {type(value).__name__}; convert it to one of these types"
            ) from None


def env_name(field: str) -> str:
    """Returns the environment variable of a field (GRPO__ROLLOUT__GROUP_SIZE) or of an alias (NUM_PRE_Q)."""
    if field in ALIASES or field in HISTORIC_NAMES:
        return field.upper()
    return ENV_PREFIX + field.upper().replace(".", "__")


def precedence(origin: str) -> int:
    """Returns the rank of the layer of a provenance; a layer overrides the layers of lower rank."""
    layer = "flag" if origin.startswith("--") else origin.partition(":")[0]
    return ("derived", "default", "yaml", "set", "env", "flag").index(layer)


def describe_origin(origin: str) -> str:
    """Formats a provenance as words for a message, for example `set` as `--set`."""
    return {"set": "--set", "default": "the default", "derived": "other settings or devices"}.get(origin, origin)


def environment_notices(environment: Layer, overrides: Layer, flags: Layer) -> list[str]:
    """Returns notices about aliases in the environment, and about `--set` values that the environment overrides."""
    environment = {field: leaf for field, leaf in environment.items() if field not in flags}
    fields_of: dict[str, list[str]] = {}
    for field, leaf in environment.items():
        fields_of.setdefault(leaf.given_name, []).append(field)
    notices = []
    for name, fields in fields_of.items():
        lost = {field: repr(overrides[field].value) for field in fields if field in overrides}
        if lost or not name.startswith(ENV_PREFIX):
            values = [lost[field] if len(fields) == 1 else f"{field} {lost[field]}" for field in lost]
            instead = f", instead of {' and '.join(values)} from --set" if lost else ""
            value = environment[fields[0]].value
            notices.append(f"environment variable {name} sets {' and '.join(fields)} to {value!r}{instead}")
    return notices


def yaml_entries(file: ConfigFile) -> Iterator[Entry]:
    """Yields an entry for each value in a settings file."""
    for name, node in flatten(parse_settings_file(file.content, name=file.name)):
        if not (name in FIELDS and name in file.left_out):
            yield name, node, f"yaml:{file.name}:{node.line}", name


def last_overrides(overrides: Iterable[str]) -> tuple[list[str], list[str]]:
    """Returns the last `--set` of each name, and notices about the earlier ones, for example from a launch script."""
    last: dict[str, str] = {}
    notices = []
    for override in overrides:
        name = override.partition("=")[0].strip()
        if (earlier := last.pop(name, override)) != override:
            notices.append(f"--set {override} replaces the earlier --set {earlier}")
        last[name] = override
    return [*last.values()], notices


def set_entries(overrides: Iterable[str]) -> Iterator[Entry]:
    """Yields an entry for each `--set NAME=VALUE`, whose value is parsed as YAML."""
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"--set {override}: expected NAME=VALUE; write it as in --set run.steps=20")
        yield name, _parse_text(value, source=f"--set {name}"), "set", name


def flag_entries(flags: Flags) -> Iterator[Entry]:
    """Yields an entry for each command option that sets a setting; its value is parsed as YAML."""
    for option, (field, value) in flags.items():
        yield field, _parse_text(value, source=option), option, option


def environment_entries(environ: Mapping[str, str]) -> Iterator[Entry]:
    """Yields an entry for each variable GRPO__SECTION__FIELD or upper-case alias; its value is parsed as YAML."""
    ours = {env_name(name): name for name in (*FIELDS, *ALIASES, *HISTORIC_NAMES)}
    for variable in sorted(environ):
        if variable in ours:
            node = _parse_text(environ[variable], source=f"environment variable {variable}")
            yield ours[variable], node, f"env:{variable}", variable
        elif variable.startswith(ENV_PREFIX):
            dotted = variable.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            _, suggestion = suggest_fields(dotted, show=lambda name: env_name(name) + "__*" * (name in SECTIONS))
            raise InputError(
                f"unknown environment variable {variable} (names are {ENV_PREFIX}SECTION__FIELD){suggestion}"
            )


def _parse_text(text: str, *, source: str) -> YamlNode:
    if not text.strip():
        raise InputError(f"{source} has no value; write null to leave the setting empty")
    return parse_yaml(text, name=source)


def build_layer(entries: Iterable[Entry]) -> Layer:
    """Returns the entries as a layer, with aliases replaced by the fields that they set.

    Raises:
        InputError: a name is unknown or a field is set twice; the message lists all such problems.
    """
    layer: Layer = {}
    problems = []
    for name, node, origin, given_name in entries:
        for field in ALIASES.get(name, (name,)):
            shown = f"{given_name} ({describe_origin(origin)})"
            if field not in FIELDS:
                problems.append(_unknown_setting_message(name, shown))
                continue
            # Free text keeps its spelling, since the revision `12e4567` is not a number.
            is_spelled = is_text(field) and node.spelling is not None and node.value is not None
            value, first = node.spelling if is_spelled else node.to_python(), layer.get(field)
            if first is None:
                layer[field] = SourcedValue(value, origin, given_name)
                continue
            # verl's general switch and one for a part may both be set, if they have the same value.
            fields_of_first = ALIASES.get(first.given_name.lower())
            general_and_part = name in ALIASES and fields_of_first not in (None, ALIASES[name])
            if not (general_and_part and first.value == value):
                earlier = f"{first.given_name} ({describe_origin(first.origin)})"
                problems.append(f"{field} is set twice: {earlier} and {shown}; keep one of them")
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more"]
    if problems:
        raise InputError("\n".join(problems))
    return layer


def _unknown_setting_message(name: str, shown: str) -> str:
    if name in SECTIONS:
        inside = next(field for field in FIELDS if field.startswith(f"{name}."))
        return f"{shown} is a section; set one of its settings, such as {inside}"
    if name.upper() in SECRETS:
        return f"{shown} is a secret; set {name.upper()} in the environment or a .env"
    return f"unknown setting {shown}{suggest_fields(name)[1]}"
