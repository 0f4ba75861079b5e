"""Prints settings as YAML that `--config` accepts, and reads that YAML as the base of another run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import yaml

from settings.loading.config_file import ConfigFile
from settings.loading.fields import flatten
from settings.loading.yaml_file import parse_scalar, parse_settings_file
from settings.schema.algorithm import ForwardRole
from settings.schema.settings import MODEL_DEFAULTS, Settings

RENDEZVOUS_FIELDS = ("mesh.coordinator_address", "mesh.num_processes", "mesh.process_id")
"""Fields that describe the hosts of an earlier run; the new run may have others."""
MICRO_BATCH_TWINS = {
    "score.max_tokens_per_device": "algorithm.max_tokens_per_device",
    "critic.rows_per_device": "algorithm.rows_per_device",
    **{
        f"score.{role}.{part}": f"score.{part}"
        for role in get_args(ForwardRole)
        for part in ("max_tokens_per_device", "rows_per_device")
    },
}
"""Maps a micro-batch field to the field from which it inherits value and provenance."""


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
    values = {}
    for field, node in flatten(parse_settings_file(content, name=name)):
        _, comment, origin = "".join(lines[node.line - 1 : node.line]).rpartition("  # ")
        values[field] = node.to_python(), origin if comment else ""
    return values


def without_derived(file: ConfigFile) -> ConfigFile:
    """Returns a run's `settings.yaml` as the base of a new run, without most values that its user did not set.

    The file has a value for every setting. If all were kept, a new `algorithm.name` would run with the estimator, clip
    and aggregation of the old one, and the new run would wait for the old run's hosts. The name and `MODEL_DEFAULTS`
    are kept.

    Raises: InputError if the file is invalid.
    """
    recorded = from_yaml(file.content, name=file.name)
    # If `--set` gave both fields the same value, one looks inherited; leaving it out changes nothing.
    inherited = [field for field, twin in MICRO_BATCH_TWINS.items() if recorded.get(field) == recorded.get(twin)]
    derived = [field for field, (_, origin) in recorded.items() if origin in ("default", "derived")]
    # The policy samples as it did in its run, whatever the devices are.
    kept = {"run.name", *MODEL_DEFAULTS}
    return replace(file, left_out=frozenset({*derived, *inherited, *RENDEZVOUS_FIELDS} - kept), is_own=False)


def format_inline(value: Any) -> str:
    """Returns a value as YAML on one line. Raises yaml.YAMLError for a type that YAML does not have."""
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("...\n").strip()


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes text that `yaml_file` would not read as text, and keeps it on one line."""


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    quoted = not text.isprintable() or parse_scalar(text) is not text
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if quoted else None)


_Dumper.add_representer(str, _represent_text)
