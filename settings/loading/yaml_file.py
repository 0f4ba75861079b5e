"""A strict YAML parser that keeps the line of every value.

Scalars follow YAML 1.2: `1e-6` is a number, and `yes`, `off`, `010`, `1:30` are not booleans, octal or base-60
numbers. Tags, repeated keys and further documents are refused. Size, depth and alias expansion are limited, so that
a malicious file can neither run code nor exhaust memory.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, ScalarNode, SequenceNode

from settings.errors import InputError

MAX_BYTES = 256 * 1024
MAX_VALUES = 10_000
"""Maximum number of values in a YAML document after alias expansion."""
MAX_DEPTH = 20
"""Maximum nesting depth; the limit also stops an alias that contains itself."""

_WORDS = {
    **dict.fromkeys(("", "~", "null", "Null", "NULL"), None),
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?[0-9]+")
_PREFIXED_INTEGER = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True, slots=True)
class YamlNode:
    """A YAML value and its line."""

    value: bool | int | float | str | list[YamlNode] | dict[str, YamlNode] | None
    line: int
    """Line number from 1; for a value in a mapping, the line of its key."""
    spelling: str | None = None
    """Spelling of an unquoted scalar, such as `1e3` for 1000.0; None for other values."""

    def to_python(self) -> Any:
        """Returns the value as plain Python objects."""
        if isinstance(self.value, dict):
            return {key: node.to_python() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.to_python() for node in self.value]
        return self.value


def parse_yaml(text: str, *, name: str) -> YamlNode:
    """Parses a YAML document; `name` is its source in errors.

    Raises:
        InputError: the text is not valid YAML; the message has the line and column.
    """
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = " ".join(part for part in (error.context, error.problem) if part)
        raise InputError(f"{name}{_position(mark)}: not valid YAML: {problem}; correct it") from None
    except yaml.YAMLError as error:
        raise InputError(f"{name}: not valid YAML: {' '.join(str(error).split())}; correct it") from None
    except RecursionError:
        raise InputError(f"{name}: values are nested more than {MAX_DEPTH} deep; remove levels of nesting") from None
    if root is None:
        return YamlNode(None, 1, "")
    return _NodeConverter(name).convert(root, line=root.start_mark.line + 1, depth=0)


def parse_settings_file(content: bytes, *, name: str) -> YamlNode:
    """Parses a settings file into its top-level mapping.

    Raises:
        InputError: the file is too large, not UTF-8, empty, or not a mapping.
    """
    if len(content) > MAX_BYTES:
        raise InputError(f"{name}: the file is larger than {MAX_BYTES // 1024} KiB; give a YAML file of settings")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise InputError(
            f"{name}:{line}: not UTF-8 text (byte 0x{content[error.start]:02x}); save it as UTF-8"
        ) from None
    root = parse_yaml(text, name=name)
    if root.value is None:
        raise InputError(f"{name}: the file is empty; write settings into it, in sections such as `run:`")
    if not isinstance(root.value, dict):
        kind = "a list" if isinstance(root.value, list) else "a single value"
        raise InputError(f"{name}: the file contains {kind}; write settings into it, in sections such as `run:`")
    return root


def parse_scalar(text: str) -> bool | int | float | str | None:
    """Returns the value of an unquoted scalar under the core schema of YAML 1.2."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _PREFIXED_INTEGER.fullmatch(text):
        return int(text, base=0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.replace(".", "", 1))
    return text


class _Loader(yaml.BaseLoader):
    """A YAML loader that refuses tags and keeps scalars as strings, which `parse_scalar` converts."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = self.peek_event()
        if getattr(event, "tag", None) is not None:
            raise ComposerError(None, None, f"the tag {event.tag!r} is not allowed", event.start_mark)
        return super().compose_node(parent, index)


class _NodeConverter:
    """Converts PyYAML's nodes to `YamlNode`, and refuses more than `MAX_VALUES` of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._num_values = 0

    def convert(self, raw: yaml.Node, *, line: int, depth: int) -> YamlNode:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise InputError(f"{self._name}: more than {MAX_VALUES} values, counting copies by aliases; remove some")
        if depth > MAX_DEPTH:
            raise InputError(f"{self._name}:{line}: values are nested more than {MAX_DEPTH} deep; remove some levels")
        if isinstance(raw, MappingNode):
            return YamlNode(self._mapping(raw, depth=depth + 1), line)
        if isinstance(raw, SequenceNode):
            items = [self.convert(item, line=item.start_mark.line + 1, depth=depth + 1) for item in raw.value]
            return YamlNode(items, line)
        assert isinstance(raw, ScalarNode)
        if raw.style is not None:  # quoted, or a block scalar
            return YamlNode(raw.value, line)
        try:
            return YamlNode(parse_scalar(raw.value), line, raw.value)
        except ValueError:  # CPython's limit on the digits of an integer
            raise InputError(f"{self._name}:{line}: the number has too many digits; write a shorter one") from None

    def _mapping(self, raw: MappingNode, *, depth: int) -> dict[str, YamlNode]:
        mapping: dict[str, YamlNode] = {}
        for key, value in raw.value:
            line = key.start_mark.line + 1
            if not isinstance(key, ScalarNode):
                raise InputError(f"{self._name}:{line}: a key is a list or a mapping; write a name before the colon")
            if key.value in mapping:
                first = mapping[key.value].line
                raise InputError(f"{self._name}:{line}: `{key.value}` is already set on line {first}; keep one of them")
            mapping[key.value] = self.convert(value, line=line, depth=depth)
        return mapping


def _position(mark: yaml.Mark | None) -> str:
    return f":{mark.line + 1}:{mark.column + 1}" if mark else ""
