"""Tools: plain functions, described to the policy by JSON schemas, whose arguments are checked before each call."""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import traceback
import types
import typing
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from app.environments.interface import ToolCall
from app.plugins.loading import LoadError
from app.plugins.values import describe_value

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}

SECTION = re.compile(r"^[ \t]*(Args|Arguments|Parameters|Returns|Raises|Yields|Examples?|Notes?):[ \t]*$", re.MULTILINE)
ARGUMENT = re.compile(r"^(?P<indent>[ \t]*)\*{0,2}(?P<name>\w+)[ \t]*(?:\([^)\n]*\))?:[ \t]*(?P<text>.*)$")


Wait = Callable[[Any], Any]
"""Returns a value, or what it becomes if it must be awaited."""


class CallError(Exception):
    """The policy called something that does not exist, or with other arguments; the text is for the policy."""


class Tool:
    """A function that the policy may call.

    Args:
        name: what the policy calls it.
        function: has a docstring, and a type hint for each parameter.

    Raises:
        LoadError: the function cannot be described.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        if isinstance(function, type) or not callable(function):
            raise LoadError(f"the tool {name} is {describe_value(function)}, not a function")
        description, texts = _read_docstring(inspect.getdoc(function) or "")
        if not description:
            raise LoadError(f"the tool {name} has no docstring, which tells the policy what it does")
        try:
            hints = typing.get_type_hints(function)
            parameters = inspect.signature(function).parameters.values()
        except (NameError, TypeError, ValueError) as error:
            raise LoadError(f"the type hints of the tool {name} cannot be read: {error}") from None
        properties = {}
        for p in parameters:
            if p.kind not in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY):
                raise LoadError(f"the tool {name} takes `{p}`; every parameter must have a name")
            schema = json_schema(hints.get(p.name))
            if schema is None:
                raise LoadError(
                    f"the parameter {p.name} of the tool {name} has {'an unknown' if p.name in hints else 'no'} type "
                    "hint; known are str, int, float, bool, list, dict, Literal, Any, and their unions with None"
                )
            properties[p.name] = schema | ({"description": texts[p.name]} if p.name in texts else {})
        self.function = function
        self.name = name
        self._properties = properties
        self._required = [p.name for p in parameters if p.default is p.empty]
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {
                "name": name,
                "description": description,
                "parameters": {"type": "object", "properties": properties, "required": self._required},
            },
        }
        """The description in the format of OpenAI, which chat templates take."""

    def convert(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments with the types of the parameters.

        Raises:
            CallError: one is missing, unknown, or of another type.
        """
        unknown = [name for name in arguments if name not in self._properties]
        missing = [name for name in self._required if name not in arguments]
        if unknown or missing:
            problem = f"has no argument {unknown[0]!r}" if unknown else f"needs the argument {missing[0]!r}"
            names = ", ".join(self._properties) or "none"
            raise CallError(f"{self.name} {problem}; its arguments: {names}")
        converted = {}
        for name, value in arguments.items():
            try:
                converted[name] = convert(value, self._properties[name])
            except (ValueError, OverflowError, RecursionError):
                kind = json.dumps({k: v for k, v in self._properties[name].items() if k != "description"})
                raise CallError(f"{name!r} of {self.name} is {repr(value)[:80]}, expected {kind}") from None
        return converted


def answer_call(call: ToolCall, tools: Mapping[str, Tool], counts: Counter[str], wait: Wait) -> str:
    """Returns the result of a call, or what is wrong with it, which is counted."""
    counts["tool_calls"] += 1
    counts["malformed_calls"] += call.error is not None
    try:
        if call.error is not None:
            raise CallError(call.error)
        if call.name not in tools:
            raise CallError(f"there is no tool {call.name!r}; the tools are {', '.join(tools) or 'none'}")
        tool = tools[call.name]
        result = wait(tool.function(**tool.convert(call.arguments)))
        return json.dumps(result, ensure_ascii=False) if isinstance(result, dict | list) else str(result)
    except MemoryError:
        raise
    except Exception as error:
        counts["tool_errors"] += 1
        is_own = isinstance(error, CallError)
        return f"Error: {error if is_own else traceback.format_exception_only(error)[-1].strip()[:1000]}"


def json_schema(hint: Any) -> dict[str, Any] | None:
    """Returns the JSON schema of a type, as transformers writes it; None for types that JSON does not have."""
    if hint is Any:
        return {}
    if isinstance(hint, type) and hint in JSON_TYPES:
        return {"type": JSON_TYPES[hint]}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal and type(arguments[0]) in JSON_TYPES:
        return {"type": JSON_TYPES[type(arguments[0])], "enum": list(arguments)}
    if origin in (Union, types.UnionType):
        options = [json_schema(one) for one in arguments if one is not type(None)]
        if None in options:
            return None
        schema: dict[str, Any] = {"anyOf": options} if len(options) > 1 else dict(options[0] or {})
        return schema | ({"nullable": True} if type(None) in arguments else {})
    inner = json_schema(arguments[-1]) if arguments else None
    if inner is None:
        return None
    if origin is list:
        return {"type": "array", "items": inner}
    return {"type": "object", "additionalProperties": inner} if origin is dict else None


def convert(value: Any, schema: Mapping[str, Any]) -> Any:
    """Returns a value of JSON with the type of the schema: policies write numbers as text, and text as numbers.

    Raises:
        ValueError: the value has another type, or is none of the allowed ones.
    """
    if value is None and schema.get("nullable"):
        return None
    for option in schema.get("anyOf", ()):
        with contextlib.suppress(ValueError, OverflowError):
            return convert(value, option)
    kind = schema.get("type")
    result: Any = value
    if isinstance(result, str) and kind not in ("string", None):
        result = json.loads(result.lower() if kind == "boolean" else result)
    if type(result) in (int, float):
        is_whole = kind == "integer" and result == int(result)
        result = int(result) if is_whole else str(result) if kind == "string" else result
        result = float(result) if kind == "number" else result
    is_right = "anyOf" not in schema if kind is None else JSON_TYPES.get(type(result)) == kind
    if not is_right or result not in schema.get("enum", [result]):
        raise ValueError
    if isinstance(result, list) and "items" in schema:
        return [convert(item, schema["items"]) for item in result]
    if isinstance(result, dict) and "additionalProperties" in schema:
        return {key: convert(item, schema["additionalProperties"]) for key, item in result.items()}
    return result


def _read_docstring(text: str) -> tuple[str, dict[str, str]]:
    """Returns the description of a function, and those of its arguments, from a docstring in Google's style."""
    parts = SECTION.split(text)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    lines = next((sections[name] for name in ("Args", "Arguments", "Parameters") if name in sections), "").splitlines()
    texts: dict[str, str] = {}
    name, indent = "", ""
    for line in lines:
        match = ARGUMENT.match(line)
        if match and (not texts or len(match["indent"]) <= len(indent)):
            name, indent = match["name"], match["indent"]
            texts[name] = match["text"].strip()
        elif texts and line.strip():
            texts[name] = f"{texts[name]} {line.strip()}".strip()
    return parts[0].strip(), texts
