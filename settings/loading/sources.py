"""The layers of settings: a YAML file, `--set`, the environment, and command options.

In each layer, a setting may be set only once, by its dotted name or an alias.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from settings.errors import InputError
from settings.loading.aliases import ALIASES
from settings.loading.fields import FIELDS, SECTIONS, is_text, suggest_fields
from settings.loading.secrets import SECRETS
from settings.loading.synonyms import HISTORIC_NAMES
from settings.loading.yaml_file import YamlNode, parse_yaml

ENV_PREFIX = "GRPO__"
MAX_PROBLEMS = 10
"""Maximum number of problems in an error; another program's file may have hundreds of unknown settings."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """A field's value and its source."""

    value: Any
    origin: str
    """Provenance: `yaml:FILE:LINE`, `set`, `env:NAME`, a flag such as `--gamma`, or `derived`."""
    node: YamlNode | None = None
    """YAML node with the lines of nested values; None if the value is derived."""
    given_name: str = ""
    """Name by which the user set it, such as `NUM_PRE_Q`; empty if it is derived."""


Layer = dict[str, SourcedValue]
"""Maps a dotted field to its value."""
Flags = Mapping[str, tuple[str, str]]
"""Maps a command option to its field and text: `--gamma` -> (`algorithm.gamma`, `0.9`)."""
NO_FLAGS: Flags = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Entry:
    """A name and a value as the user wrote them; the name may be unknown."""

    name: str
    node: YamlNode
    origin: str
    given_name: str
    """Name as the user wrote it, such as `NUM_PRE_Q`."""


def yaml_layer(root: YamlNode, *, file: str) -> Layer:
    """Returns the layer of a settings file."""
    return _build_layer(
        _Entry(name, node, f"yaml:{file}:{node.line}", name) for name, node in _flatten(root.value, prefix="")
    )


def set_layer(overrides: Iterable[str]) -> Layer:
    """Returns the layer of `--set NAME=VALUE` options, whose values are YAML."""
    return _build_layer(_set_entries(overrides))


def environment_layer(environ: Mapping[str, str]) -> Layer:
    """Returns the layer of GRPO__SECTION__FIELD and upper-case aliases, whose values are YAML."""
    return _build_layer(_environment_entries(environ))


def flag_layer(flags: Flags) -> Layer:
    """Returns the layer of a command's options, whose values are YAML."""
    return _build_layer(_flag_entries(flags))


def env_name(field: str) -> str:
    """Returns a field's environment variable, such as GRPO__ROLLOUT__GROUP_SIZE, or an alias's, such as NUM_PRE_Q."""
    if field in ALIASES or field in HISTORIC_NAMES:
        return field.upper()
    return ENV_PREFIX + field.upper().replace(".", "__")


def precedence(origin: str) -> int:
    """Returns the rank of a provenance's layer; a larger rank overrides a smaller one."""
    layer = "flag" if origin.startswith("--") else origin.partition(":")[0]
    return ("derived", "default", "yaml", "set", "env", "flag").index(layer)


def describe_origin(origin: str) -> str:
    """Returns a provenance as worded in messages."""
    return {"set": "--set", "default": "the default", "derived": "other settings"}.get(origin, origin)


def environment_notices(environment: Layer, overrides: Layer, flags: Layer) -> list[str]:
    """Returns notices about aliases in the environment, and `--set` values that the environment overrides."""
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


def _flatten(section: Any, *, prefix: str) -> Iterator[tuple[str, YamlNode]]:
    """Yields every dotted name in a mapping with its node; empty sections are skipped."""
    for key, node in section.items():
        name = prefix + key
        if name not in FIELDS and isinstance(node.value, dict) and (node.value or name in SECTIONS):
            yield from _flatten(node.value, prefix=f"{name}.")
        elif name not in SECTIONS or node.value is not None:
            yield name, node


def _set_entries(overrides: Iterable[str]) -> Iterator[_Entry]:
    for override in overrides:
        name, equals, value = override.partition("=")
        name = name.strip()
        if not equals or not name:
            raise InputError(f"--set {override}: expected NAME=VALUE, as in --set run.steps=20")
        if not value.strip():
            raise InputError(f"--set {name}= has no value; to reset the setting, write {name}=null")
        yield _Entry(name, parse_yaml(value, name=f"--set {name}"), "set", name)


def _flag_entries(flags: Flags) -> Iterator[_Entry]:
    for option, (field, value) in flags.items():
        if not value.strip():
            raise InputError(f"{option} has no value; to reset the setting, write {option} null")
        yield _Entry(field, parse_yaml(value, name=option), option, option)


def _environment_entries(environ: Mapping[str, str]) -> Iterator[_Entry]:
    ours = {env_name(name): name for name in (*FIELDS, *ALIASES, *HISTORIC_NAMES)}
    for variable in sorted(environ):
        if variable not in ours and not variable.startswith(ENV_PREFIX):
            continue
        if variable not in ours:
            dotted = variable.removeprefix(ENV_PREFIX).replace("__", ".").lower()
            _, suggestion = suggest_fields(dotted, show=lambda name: env_name(name) + "__*" * (name in SECTIONS))
            raise InputError(
                f"unknown environment variable {variable} (names are {ENV_PREFIX}SECTION__FIELD){suggestion}"
            )
        if not environ[variable].strip():
            raise InputError(f"environment variable {variable} is empty; unset it, or set it to null")
        node = parse_yaml(environ[variable], name=f"environment variable {variable}")
        yield _Entry(ours[variable], node, f"env:{variable}", variable)


def _build_layer(entries: Iterable[_Entry]) -> Layer:
    """Returns the values by field.

    Raises:
        InputError: a name is unknown or a field is set twice; the message lists such problems.
    """
    layer: dict[str, tuple[_Entry, SourcedValue]] = {}
    problems = []
    for entry in entries:
        for field in ALIASES.get(entry.name, (entry.name,)):
            if field not in FIELDS:
                problems.append(_unknown_setting_message(entry))
            elif field in layer:
                first, leaf = layer[field]
                # verl's general switch and one for a part may both be set, if they have the same value.
                both_are_historic = {first.name, entry.name} <= ALIASES.keys()
                general_and_part = both_are_historic and ALIASES[first.name] != ALIASES[entry.name]
                if not (general_and_part and leaf.value == _parse_value(entry.node, field)):
                    problems.append(
                        f"{field} is set twice: {_describe_entry(first)} and {_describe_entry(entry)}; keep one of them"
                    )
            else:
                layer[field] = (
                    entry,
                    SourcedValue(_parse_value(entry.node, field), entry.origin, entry.node, entry.given_name),
                )
    if len(problems) > MAX_PROBLEMS:
        problems[MAX_PROBLEMS:] = [f"and {len(problems) - MAX_PROBLEMS} more"]
    if problems:
        raise InputError("\n".join(problems))
    return {field: leaf for field, (_, leaf) in layer.items()}


def _parse_value(node: YamlNode, field: str) -> Any:
    """Returns the value of a node; free text keeps its spelling, since the revision `12e4567` is not a number."""
    if is_text(field) and node.spelling is not None and node.value is not None:
        return node.spelling
    return node.to_python()


def _describe_entry(entry: _Entry) -> str:
    return f"{entry.given_name} ({describe_origin(entry.origin)})"


def _unknown_setting_message(entry: _Entry) -> str:
    if entry.name in SECTIONS:
        inside = next(field for field in FIELDS if field.startswith(f"{entry.name}."))
        return f"{_describe_entry(entry)} is a section; set one of its settings, such as {inside}"
    if entry.name.upper() in SECRETS:
        return f"{_describe_entry(entry)} is a secret; set {entry.name.upper()} in the environment or a .env"
    return f"unknown setting {_describe_entry(entry)}{suggest_fields(entry.name)[1]}"
