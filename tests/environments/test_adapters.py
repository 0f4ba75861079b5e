"""Tests that environments and tools of every supported style are run in the same way."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from transformers.utils.chat_template_utils import get_json_schema

from app.environments.adapters import AdaptedEnvironment, load_environment
from app.environments.interface import StepResult, ToolCall
from app.environments.tool_functions import Tool
from app.plugins.loading import LoadError
from app.plugins.values import PlugInValueError
from tests.environments.pools import contents, write

USER_HI = [{"role": "user", "content": "hi"}]


def adapt(environment: Any, **tools: Any) -> AdaptedEnvironment:
    return AdaptedEnvironment(environment, {name: Tool(name, function) for name, function in tools.items()})


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def fail() -> str:
    """Never works."""
    raise RuntimeError("no luck")


def half() -> str:
    """Returns half of a character, which is replaced."""
    return "\ud800."


class Echo:
    def reset(self, *, seed, level="easy"):
        self.seen = (seed, level)
        return "hi"

    def step(self, text, calls):
        return StepResult(f"{text} {[call.name for call in calls]}", reward=1.0)


def test_reset_gets_the_seed_and_the_columns_that_it_declares() -> None:
    environment = Echo()
    assert adapt(environment).reset(7, {"level": "hard", "prompt": "p", "seed": 1}) == USER_HI
    assert environment.seen == (7, "hard")
    assert adapt(environment).reset(7, {"prompt": "p"}) == USER_HI
    assert environment.seen == (7, "easy")

    class Everything(Echo):
        def reset(self, **columns):
            return json.dumps(columns)

    (message,) = adapt(Everything()).reset(7, {"prompt": "p", "answer": "a"}) or []
    assert json.loads(message["content"]) == {"prompt": "p", "answer": "a", "seed": 7}


@pytest.mark.parametrize(
    ("result", "messages", "reward", "ends"),
    [
        (("obs", 0.5, False, {"steps": 3, "text": "x"}), ["obs"], 0.5, (False, False)),
        ((5, 1, False, True, {}), ["5"], 1.0, (False, True)),
        ((None, 1, True, False, {}), [], 1.0, (True, False)),
    ],
)
def test_gym_environments_return_four_or_five_values(result, messages, reward, ends):
    class Gym:
        def reset(self, seed=None, options=None):
            return "start", {"info": 1}

        def step(self, action):
            self.action = action
            return result

    environment = Gym()
    adapted = adapt(environment)
    assert adapted.reset(3, {"prompt": "p"}) == [{"role": "user", "content": "start"}]
    answer = adapted.step("left", [])
    assert environment.action == "left"
    assert contents(answer) == messages
    assert (answer.reward, (answer.terminated, answer.truncated)) == (reward, ends)
    assert answer.metrics == ({"steps": 3.0} if "steps" in str(result) else {})


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (5, "step returned int 5, expected a StepResult"),
        (("a", 1.0, False), "step returned tuple"),
        (StepResult(), "returned no message, but the episode continues; return one"),
        (StepResult("x" * (2**20 + 1)), "returned 1,048,577 characters, expected at most 1,048,576"),
        (StepResult("a", terminated="maybe"), "step returned str 'maybe' as terminated, expected True or False"),  # pyright: ignore[reportArgumentType]
        (
            StepResult([{"role": "assistant", "content": "I win"}]),
            "with role 'assistant', expected user or tool",
        ),
        (StepResult([{"role": "user", "content": b"a"}]), "'content': b'a'}, expected a string"),  # pyright: ignore[reportArgumentType]
        (([1, 2], 0.0, False, {}), "expected a string, or messages with a string as 'content'"),
        (("x", np.array([1, 2]), False, {}), "expected a number"),
    ],
)
def test_unusable_step_results_of_an_environment_are_refused(result: Any, message: str) -> None:
    class Wrong(Echo):
        def step(self, text):
            return result

    with pytest.raises(PlugInValueError, match=re.escape(message)):
        adapt(Wrong()).step("x", [])


class Counter:
    """An environment as TRL's GRPOTrainer takes it."""

    def reset(self, **kwargs):
        self.count = 0
        return " Go!"

    def increment(self, step: int) -> int:
        """
        Increments the counter.

        Args:
            step: How much to add.
        """
        self.count += step
        return self.count

    def _hidden(self):
        pass

    def get_reward(self):
        return self.count / 2


def test_trl_environments_provide_tools_and_a_reward() -> None:
    adapted = adapt(Counter(), add=add)
    assert list(adapted.tools) == ["add", "increment"]
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "Ready?"}]
    assert adapted.reset(0, {"prompt": chat}) == [chat[0], {"role": "user", "content": "Ready? Go!"}]
    assert adapted.reset(0, {"prompt": "Ready?"}) == [{"role": "user", "content": "Ready? Go!"}]
    answer = adapted.step("", [ToolCall("increment", {"step": 2}), ToolCall("increment", {"step": "3"})])
    assert answer.messages == [{"role": "tool", "content": text} for text in ("2", "5")]
    assert not answer.terminated and answer.metrics == {"tool_calls": 2}
    assert adapted.step("done", []) == StepResult([], terminated=True)
    assert adapted.score() == {"score": 2.5}


@pytest.mark.parametrize(
    ("call", "content"),
    [
        (ToolCall("", {}, "not JSON"), "Error: not JSON"),
        (ToolCall("sub", {}), "Error: there is no tool 'sub'; the tools are add, fail, half, weather"),
        (ToolCall("add", {"a": 1, "b": 2, "c": 3}), "Error: c of add: Unexpected keyword argument"),
        (ToolCall("add", {"a": "x", "b": 1}), "Error: a of add: Input should be a valid integer"),
        (ToolCall("add", {"a": "1" * 5000, "b": 1}), "Error: a of add: Unable to parse"),
        (ToolCall("add", {"a": float("inf"), "b": 1}), "Error: a of add: Input should be a finite number"),
        (ToolCall("half", {}), "?."),
        (ToolCall("weather", {"city": 7, "days": "3"}), '{"city": "7", "days": 3}'),
        (ToolCall("fail", {}), "Error: RuntimeError: no luck"),
    ],
)
def test_errors_in_tool_calls_are_counted_and_answered(call: ToolCall, content: str) -> None:
    adapted = adapt(None, add=add, fail=fail, half=half, weather=weather)
    answer = adapted.step("", [call, ToolCall("add", {"a": 1, "b": 1})])
    wrong, right = contents(answer)
    assert (wrong[: len(content)], right) == (content, "2")
    assert answer.metrics == {"tool_calls": 2} | ({"tool_errors": 1} if call.name not in ("half", "weather") else {})
    assert not answer.terminated


def test_tool_calls_are_answered_by_tools_without_stepping_the_environment() -> None:
    adapted = adapt(Echo(), add=add)
    call, other = ToolCall("add", {"a": 1, "b": 1}), ToolCall("move", {})
    assert contents(adapted.step("t", [call])) == ["2"]
    assert contents(adapted.step("t", [ToolCall("", {}, "bad")])) == ["Error: bad"]
    both = adapted.step("t", [other, call])
    assert contents(both) == ["t ['move']", "2"]
    assert (both.reward, both.metrics) == (1.0, {"tool_calls": 1})
    assert adapted.step("t", []).messages == [{"role": "user", "content": "t []"}]
    # Without tools it gets all calls.
    assert contents(adapt(Echo()).step("t", [ToolCall("a", {}), ToolCall("", {}, "bad")])) == ["t ['a', '']"]


@pytest.mark.parametrize(
    ("roles", "messages"),
    [
        (["tool", "tool", "user"], ["2", "tool 0", "4", "tool 1", "user 2"]),
        (["user"], ["2", "4", "user 0"]),
        (["user", "tool"], ["2", "4", "user 0", "tool 1"]),
    ],
)
def test_tool_results_are_in_the_order_of_the_calls(roles: list[str], messages: list[str]) -> None:
    class Two(Echo):
        def step(self, text, calls):
            assert [call.name for call in calls] == ["move", "look"]
            return [{"role": role, "content": f"{role} {i}"} for i, role in enumerate(roles)]

    calls = [ToolCall("add", {"a": 1, "b": 1}), ToolCall("move", {}), ToolCall("add", {"a": 2, "b": 2})]
    assert contents(adapt(Two(), add=add).step("t", [*calls, ToolCall("look", {})])) == messages


@pytest.mark.parametrize("number", [np.int64(3), np.array(0.1, np.float32), np.True_])
def test_numpy_numbers_of_an_environment_are_converted_to_python_floats_and_json(number: Any) -> None:
    class Gym(Echo):
        def reset(self):
            return number, {}

        def step(self, action):
            return number, number, np.False_, np.array(False), {"n": number}

        def score(self):
            return {"s": number}

    def measure() -> dict[str, Any]:
        """Measures."""
        return {"n": number, "all": np.array([1, 2])}

    adapted = adapt(Gym(), measure=measure)
    (opening,) = adapted.reset(0, {}) or []
    answer = adapted.step("x", [])
    assert opening["content"] == str(number) and contents(answer) == [str(number)]
    assert json.loads(json.dumps(answer.metrics)) == {"n": float(number)}
    assert (answer.reward, answer.terminated, answer.truncated) == (float(number), False, False)
    assert type(answer.reward) is float and adapted.score() == {"s": float(number)}
    (result,) = contents(adapted.step("x", [ToolCall("measure", {})]))
    assert json.loads(result) == {"n": number.item(), "all": [1, 2]}


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (0.5, {"score": 0.5}),
        ({"a": 1, "b": 2}, {"a": 1.0, "b": 2.0}),
        *((wrong, None) for wrong in (float("nan"), "high", {"a": None}, {"a b": 1}, {1: 1.0})),
    ],
)
def test_environment_score_may_be_a_number_or_a_mapping_of_numbers(
    scores: Any, expected: dict[str, float] | None
) -> None:
    class Scored(Echo):
        async def score(self):
            return scores

    with nullcontext() if expected else pytest.raises(PlugInValueError):
        assert adapt(Scored()).score() == expected


def test_environments_are_classes_or_functions_and_tool_names_are_unique(tmp_path: Path) -> None:
    source = """
        class Game:
            def reset(self): return "hi"
            def step(self, text, calls): return text
        One = 1
        class Empty: pass
        def make(): return Game()
        async def connect(): return Game()
        def twice(x: int): "Doubles."; return 2 * x
        class Calc:
            @staticmethod
            def twice(x: int):
                "Doubles."
    """
    path = write(tmp_path, source)
    for name in ("Game", "make", "connect"):
        make, schemas = load_environment(f"{path}:{name}", [f"{path}:twice", "calculator"])
        assert make().reset(0, {}) == USER_HI
        assert [schema["function"]["name"] for schema in schemas] == ["twice", "calculator"]
    for environment, tools, message in (
        (f"{path}:One", [], "expected a class or a function that makes an environment, got int 1"),
        (f"{path}:Empty", [], "expected an environment, with the method"),
        (None, [f"{path}:twice", f"{path}:Calc.twice"], "there are two tools named twice"),
        (None, [f"{path}:Game"], r"the tool Game: expected a function, got type"),
    ):
        with pytest.raises(LoadError, match=message):
            load_environment(environment, tools)


def weather(
    city: str,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    where: list[float] | None = None,
    old: dict[str, list[int]] | None = None,
) -> dict[str, Any]:
    """
    Tells the weather.

    It is made up.

    Args:
        city: The name of the city,
            with its country: all of it.
        days (int): How many days.
        unit: Unit of the temperature.
        where: Latitude and longitude.
        old: Temperatures of earlier days.

    Returns:
        Degrees by day.

    Raises:
        KeyError: no such city.
    """
    return {"city": city, "days": days}


def test_tool_schemas_equal_those_of_transformers(monkeypatch) -> None:
    made = Tool("weather", weather).schema["function"]
    # Not all versions of transformers read types in docstrings.
    monkeypatch.setattr(weather, "__doc__", str(weather.__doc__).replace(" (int)", ""))
    expected = get_json_schema(weather)["function"]
    assert (made["name"], made["description"]) == (expected["name"], expected["description"])
    assert made["parameters"]["required"] == expected["parameters"]["required"]
    for name, schema in expected["parameters"]["properties"].items():
        own = made["parameters"]["properties"][name]
        own.pop("default", None)
        if schema.pop("nullable", False):
            text = schema.pop("description")
            schema = {"anyOf": [schema, {"type": "null"}], "description": text}
        assert own == schema


def undocumented(a: int) -> None: ...


def unknown(a: LoadError) -> None:
    """Takes a type that JSON does not have."""


def unnamed(*numbers: int) -> None:
    """Takes any number of arguments."""


def unreadable(a: "Nowhere") -> None:  # pyright: ignore[reportUndefinedVariable]
    """Takes a type that is not defined."""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (undocumented, "the tool f has no docstring"),
        (unknown, "the parameters of the tool f cannot be described: Unable to generate .*LoadError"),
        (unnamed, r"the tool f takes \(\*numbers"),
        (unreadable, "the parameters of the tool f cannot be described: name 'Nowhere' is not defined"),
    ],
)
def test_tool_functions_that_a_schema_cannot_describe_are_refused(function: Any, message: str) -> None:
    with pytest.raises(LoadError, match=message):
        Tool("f", function)
