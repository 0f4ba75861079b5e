"""Tools: plain functions, described to the policy by JSON schemas, whose arguments are checked before each call."""

from __future__ import annotations

import inspect
import json
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic_core import ArgsKwargs

from app.environments.interface import ToolCall
from app.plugins.loading import LoadError
from app.plugins.values import await_value, describe_value

ARGUMENT_SECTION = re.compile(r"(?ms)^(?:Args|Arguments|Parameters):\n(.*?)(?=^\S|\Z)")
ARGUMENT = re.compile(r"(?m)^ +(\w+)(?: \(.*?\))?: (.*(?:\n {5,}.*)*)")
"""An argument and its text in a Google-style docstring, where continuation lines are indented further."""


class Tool:
    """A function that the policy may call.

    Args:
        name: the name that the policy uses.
        function: must have a docstring, and a type hint for each parameter.

    Raises:
        LoadError: the function cannot be described.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        if isinstance(function, type) or not callable(function):
            raise LoadError(f"the tool {name}: expected a function, got {describe_value(function)}")
        text = inspect.getdoc(function)
        if not text:
            raise LoadError(f"the tool {name} has no docstring; add one that tells the policy what it does")
        callee: Any = function
        try:
            # Policies write numbers where strings are expected, and vice versa.
            self._call = TypeAdapter(callee, config=ConfigDict(coerce_numbers_to_str=True))
            described = self._call.json_schema()
        except (PydanticUserError, NameError, TypeError) as error:
            reason = str(error).splitlines()[0]
            raise LoadError(
                f"the parameters of the tool {name} cannot be described: {reason}; annotate them with types that JSON "
                "can represent"
            ) from None
        if described["type"] != "object":
            raise LoadError(
                f"the tool {name} takes {inspect.signature(function)}; calls name all arguments, so remove `*args` and "
                "parameters before `/`"
            )
        parameters = {key: described[key] for key in ("type", "properties", "required", "$defs") if key in described}
        for schema in parameters["properties"].values():
            schema.pop("title", None)  # repeats the name
        section = ARGUMENT_SECTION.search(text)
        for parameter, description in ARGUMENT.findall(section[1]) if section else ():
            if parameter in parameters["properties"]:
                parameters["properties"][parameter]["description"] = " ".join(description.split())
        description = re.split(r"(?m)^\w+:\n", text)[0].strip()
        self.name = name
        self.schema: dict[str, Any] = {
            "type": "function",
            "function": {"name": name, "description": description, "parameters": parameters},
        }
        """The description in OpenAI's format, which chat templates expect."""

    def __call__(self, arguments: Mapping[str, Any]) -> Any:
        """Calls the function with arguments converted to its declared types.

        Raises:
            ValidationError: an argument is missing, unknown, or has the wrong type.
        """
        return self._call.validate_python(ArgsKwargs((), dict(arguments)))


def answer_calls(calls: Sequence[ToolCall], tools: Mapping[str, Tool]) -> tuple[list[dict[str, str]], dict[str, float]]:
    """Returns a message with the result or error of each call, and the metrics `tool_calls` and `tool_errors`."""
    results = [_answer_call(call, tools) for call in calls]
    counts = {"tool_calls": len(calls), "tool_errors": sum(not is_right for _, is_right in results)}
    messages = [{"role": "tool", "content": text} for text, _ in results]
    return messages, {name: float(number) for name, number in counts.items() if number}


def _answer_call(call: ToolCall, tools: Mapping[str, Tool]) -> tuple[str, bool]:
    """Returns the result of a call and True, or an error for the policy and False."""
    if call.error is not None:
        return f"Error: {call.error}", False
    if call.name not in tools:
        return f"Error: there is no tool {call.name!r}; the tools are {', '.join(tools) or 'none'}", False
    try:
        result = await_value(tools[call.name](call.arguments))
        if isinstance(result, dict | list):
            # NumPy numbers and arrays become JSON numbers and lists, other objects text.
            result = json.dumps(result, ensure_ascii=False, default=lambda one: getattr(one, "tolist", one.__str__)())
        return str(result), True
    except MemoryError:
        raise
    except ValidationError as error:
        [problem, *_] = error.errors(include_url=False)
        return f"Error: {'.'.join(map(str, problem['loc']))} of {call.name}: {problem['msg']}", False
    except Exception as error:
        return f"Error: {traceback.format_exception_only(error)[-1].strip()[:1000]}", False
