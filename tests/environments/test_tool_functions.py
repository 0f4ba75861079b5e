"""Tests of the schemas of tools, compared with transformers, and of the arguments that they get."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from app.environments.tool_functions import Tool
from app.plugins.loading import LoadError


def weather(
    city: str, days: int = 1, unit: Literal["C", "F"] = "C", where: list[float] | None = None
) -> dict[str, int]:
    """
    Tells the weather.

    It is made up.

    Args:
        city: The name of the city,
            with its country: all of it.
        days (int): How many days.
        unit: Of the temperature.
        where: Latitude and longitude.

    Returns:
        Degrees by day.

    Raises:
        KeyError: no such city.
    """
    return {}


def table(rows: list[dict[str, int]], flag: bool, name: str | None, extra: dict[str, list[str]]) -> None:
    """Writes a table.

    Args:
        rows: The rows.
        flag: A flag.
        name: A name.
        extra: More.
    """


@pytest.mark.parametrize("function", [weather, table])
def test_schemas_are_those_of_transformers_with_defaults_and_null_as_a_type(function: Any) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    expected = get_json_schema(function)["function"]
    made = Tool(function.__name__, function).schema["function"]
    assert (made["name"], made["description"]) == (expected["name"], expected["description"])
    assert made["parameters"]["required"] == expected["parameters"]["required"]
    for name, schema in expected["parameters"]["properties"].items():
        own = made["parameters"]["properties"][name]
        own.pop("default", None)
        if schema.pop("nullable", False):
            text = schema.pop("description")
            schema = {"anyOf": [schema, {"type": "null"}], "description": text}
        assert own == schema


def test_a_tool_without_texts_for_its_arguments_is_described_without_them() -> None:
    def add(a: int, b: Any = None) -> int:
        "Adds."
        return a

    parameters = Tool("add", add).schema["function"]["parameters"]
    assert parameters == {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"default": None}},
        "required": ["a"],
    }


def undocumented(a: int) -> None: ...


def unknown(a: LoadError) -> None:
    """Takes what JSON does not have."""


def unnamed(*numbers: int) -> None:
    """Takes any number of arguments."""


def unreadable(a: Nowhere) -> None:  # pyright: ignore[reportUndefinedVariable]
    """Has the type of nothing."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "the tool f has no docstring"),
        (unknown, "the parameters of the tool f cannot be described: Unable to generate .*LoadError"),
        (unnamed, r"the tool f takes \(\*numbers"),
        (unreadable, "the parameters of the tool f cannot be described: name 'Nowhere' is not defined"),
        (int, "the tool f is type <class 'int'>, not a function"),
    ],
)
def test_a_function_that_cannot_be_described_is_refused(function: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Tool("f", function)


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (int, "3", 3),
        (str, 3, "3"),
        (bool, "True", True),
        (list[int], ["1", 2.0], [1, 2]),
        (int | None, None, None),
        (Literal["a", "b"], "b", "b"),
        (Any, [1, "x"], [1, "x"]),
    ],
)
def test_arguments_become_what_the_function_declares(hint: Any, value: Any, expected: Any) -> None:
    converted = returns(hint)({"x": value})
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, "x"),
        (str, None),
        (list[int], [1, "x"]),
        (Literal["a", "b"], "c"),
    ],
)
def test_arguments_of_another_type_are_refused(hint: Any, value: Any) -> None:
    with pytest.raises(ValidationError):
        returns(hint)({"x": value})


def returns(hint: Any) -> Tool:
    """Makes a tool that returns its argument of this type."""

    def tool(x: Any) -> Any:
        "Returns x."
        return x

    tool.__annotations__["x"] = hint
    return Tool("f", tool)
