"""Prints settings as YAML that `--config` accepts, and parses it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from settings.loading.yaml_file import YamlNode, parse_scalar, parse_settings_file
from settings.schema.settings import Settings


def to_yaml(settings: Settings, provenance: Mapping[str, str]) -> str:
    """Returns YAML with one setting per line and its provenance as a comment."""
    return "\n".join(_format_lines(settings.model_dump(mode="json"), provenance, prefix="")) + "\n"


def _format_lines(section: dict[str, Any], provenance: Mapping[str, str], *, prefix: str) -> list[str]:
    lines = []
    indent = "  " * prefix.count(".")
    for name, value in section.items():
        field = prefix + name
        if field in provenance:
            lines.append(f"{indent}{name}: {format_inline(value)}  # {provenance[field]}")
        else:
            lines += [f"{indent}{name}:", *_format_lines(value, provenance, prefix=f"{field}.")]
    return lines


def from_yaml(content: bytes, *, name: str) -> dict[str, tuple[Any, str]]:
    """Parses the output of `to_yaml` into dotted setting -> (value, provenance).

    The schema is not checked, so that the settings of an old run can be shown even if they are no longer valid.

    Raises:
        InputError: the content is not a YAML file of sections.
    """
    lines = content.decode("utf-8-sig", errors="replace").split("\n")
    return dict(_parse_lines(parse_settings_file(content, name=name), lines, prefix=""))


def _parse_lines(section: YamlNode, lines: list[str], *, prefix: str) -> Iterator[tuple[str, tuple[Any, str]]]:
    assert isinstance(section.value, dict)
    for name, node in section.value.items():
        line = lines[node.line - 1] if node.line <= len(lines) else ""
        _, comment, origin = line.rpartition("  # ")
        if isinstance(node.value, dict) and not comment:
            yield from _parse_lines(node, lines, prefix=f"{prefix}{name}.")
        else:
            yield prefix + name, (node.to_python(), origin if comment else "")


def format_inline(value: Any) -> str:
    """Returns a value as YAML on one line. Raises yaml.YAMLError if it is of another type than YAML has."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes text if `yaml_file` would read it differently, and keeps text on one line."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    quoted = not text.isprintable() or parse_scalar(text) is not text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent_text)
