"""Tests of the schemas of tools, compared with transformers, and of the conversion of arguments."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from app.environments.tool_functions import CallError, Tool, convert, json_schema
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
def test_schemas_are_those_of_transformers(function: Any) -> None:
    from transformers.utils.chat_template_utils import get_json_schema

    expected = get_json_schema(function)
    expected["function"].pop("return", None)
    expected["function"]["parameters"].setdefault("required", [])
    assert Tool(function.__name__, function).schema == expected


def test_a_tool_without_texts_for_its_arguments_is_described_without_them() -> None:
    def add(a: int, b: Any = None) -> int:
        "Adds."
        return a

    parameters = Tool("add", add).schema["function"]["parameters"]
    assert parameters == {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]}


def undocumented(a: int) -> None: ...


def untyped(a) -> None:
    """Has no types."""


def unknown(a: complex) -> None:
    """Takes what JSON does not have."""


def unnamed(*numbers: int) -> None:
    """Takes any number of arguments."""


def unreadable(a: Nowhere) -> None:  # pyright: ignore[reportUndefinedVariable]
    """Has the type of nothing."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "the tool f has no docstring"),
        (untyped, "the parameter a of the tool f has no type hint"),
        (unknown, "the parameter a of the tool f has an unknown type hint; known are str, int"),
        (unnamed, r"the tool f takes `\*numbers"),
        (unreadable, "the type hints of the tool f cannot be read: name 'Nowhere' is not defined"),
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
        (int, 3.0, 3),
        (float, 3, 3.0),
        (float, "1e3", 1000.0),
        (str, 3, "3"),
        (str, "3", "3"),
        (bool, "True", True),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], ["1", 2.0], [1, 2]),
        (dict[str, float], {"a": 1}, {"a": 1.0}),
        (dict, '{"a": 1}', {"a": 1}),
        (int | None, None, None),
        (int | str, "x", "x"),
        (int | str, "3", 3),
        (Literal["a", "b"], "b", "b"),
        (Literal[1, 2], "2", 2),
        (Any, [1, "x"], [1, "x"]),
    ],
)
def test_arguments_become_what_the_function_declares(hint: Any, value: Any, expected: Any) -> None:
    converted = convert(value, json_schema(hint) or {})
    assert converted == expected and type(converted) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (int, "x"),
        (int, 3.5),
        (int, True),
        (int, None),
        (int, [1]),
        (float, "one"),
        (float, 10**400),
        (str, None),
        (str, ["a"]),
        (bool, 1),
        (list[int], [1, "x"]),
        (list[int], 1),
        (dict[str, int], {"a": "x"}),
        (int | bool, "x"),
        (Literal["a", "b"], "c"),
    ],
)
def test_arguments_of_another_type_are_refused(hint: Any, value: Any) -> None:
    def tool(x: Any) -> None:
        "Takes x."

    tool.__annotations__["x"] = hint
    with pytest.raises(CallError, match=r"^'x' of f is .*, expected "):
        Tool("f", tool).convert({"x": value})
