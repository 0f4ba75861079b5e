"""One interface to all kinds of user environments, which are told apart by their methods and return values.

    reset(seed=, <columns>), step(text, calls) -> StepResult, text or chat      the interface of this program
    reset(seed=), step(action) -> (obs, reward, done, info)                     Gym
    reset(seed=), step(action) -> (obs, reward, terminated, truncated, info)    Gymnasium
    reset(<columns>) and public methods, which are tools; get_reward()          TRL's `environment_factory`
    functions, which are tools                                                  TRL's `tools`

Mistakes of the policy in tool calls become messages to it and are counted. A turn without a call is the policy's
answer, and ends an episode that has only tools.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.environments.builtin import ENVIRONMENTS, TOOLS
from app.environments.interface import StepResult, ToolCall
from app.environments.tool_functions import Tool, answer_calls
from app.plugins.loading import LoadError, load_object
from app.plugins.values import (
    EXTRA_NAME_PATTERN,
    PlugInValueError,
    await_value,
    collect_extras,
    describe_value,
    to_number,
)

MAX_CHARACTERS = 2**20
"""Maximum number of characters of an observation before it is cut to `env.max_observation_tokens`."""
NOT_TOOLS = ("reset", "get_reward", "close")
"""Public methods of TRL's environments that the policy cannot call."""


def load_environment(
    source: str | None, tools: Sequence[str]
) -> tuple[Callable[[], AdaptedEnvironment], list[dict[str, Any]]]:
    """Returns a factory of environments from `env.source` and `env.tools`, and the schemas of the tools.

    Raises:
        LoadError: an environment or a tool cannot be imported, or has the wrong interface.
        Exception: raised by the user's constructor.
    """
    shared: dict[str, Tool] = {}
    for path in tools:
        name = path.rpartition(":")[2].rpartition(".")[2]
        _add(shared, Tool(name, TOOLS.get(path) or load_object(path)))
    made = source and (ENVIRONMENTS.get(source) or load_object(source))
    if source and not callable(made):
        got = describe_value(made)
        raise LoadError(f"expected a class or a function that makes an environment, got {got}; correct env.source")

    def make() -> AdaptedEnvironment:
        return AdaptedEnvironment(await_value(made()) if made else None, shared)

    return make, [tool.schema for tool in make().tools.values()]


def _add(tools: dict[str, Tool], tool: Tool) -> None:
    if tool.name in tools:
        raise LoadError(f"there are two tools named {tool.name}; rename one")
    tools[tool.name] = tool


class AdaptedEnvironment:
    """The user's environment, tools, or both, for one episode.

    Args:
        environment: the user's object; None with tools only.
        tools: maps the names in `env.tools` to the tools; the environment never gets calls of these.

    Raises:
        LoadError: the object is not an environment.
    """

    def __init__(self, environment: Any, tools: Mapping[str, Tool]) -> None:
        self._environment = environment
        self._has_step = hasattr(environment, "step")
        self.tools = dict(tools)
        """Maps names to the tools that are described to the policy."""
        self._is_reset = False
        if environment is None:
            return
        methods = [name for name in dir(environment) if not name.startswith("_") and name not in NOT_TOOLS]
        for name in methods if not self._has_step else ():
            if inspect.isroutine(method := getattr(environment, name)):
                _add(self.tools, Tool(name, method))
        if not hasattr(environment, "reset") or not (self._has_step or self.tools):
            raise LoadError(
                "expected an environment, with the method `reset` and either `step` or tools, got "
                f"{describe_value(environment)}; add the missing methods"
            )
        self._takes_calls = self._has_step and "calls" in inspect.signature(environment.step).parameters

    def reset(self, seed: int, columns: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        """Starts the episode and returns its opening messages, or None if it opens with the prompt of the data row."""
        if self._environment is None:
            return None
        self._is_reset = True
        parameters = inspect.signature(self._environment.reset).parameters
        given = {**columns, "seed": seed}
        if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
            given = {name: value for name, value in given.items() if name in parameters}
        opening = await_value(self._environment.reset(**given))
        if isinstance(opening, tuple) and len(opening) == 2 and isinstance(opening[1], Mapping):  # Gymnasium
            opening = opening[0]
        if opening is None:
            return None
        if not self._has_step and isinstance(opening, str):  # TRL appends the opening to the prompt
            prompt = columns["prompt"]
            chat = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
            said = chat[-1]["content"]
            said = [*said, {"type": "text", "text": opening}] if isinstance(said, list) else (said or "") + opening
            return [*chat[:-1], {**chat[-1], "content": said}]
        return read_messages(opening, ("user", "system", "assistant", "tool"))

    def step(self, text: str, calls: Sequence[ToolCall]) -> StepResult:
        """Answers a turn: `env.tools` answer calls of these tools, and the environment answers everything else.

        The messages are in the order of the calls. If the environment's messages do not begin with one `tool` message
        for each of its calls, they cannot be matched to them, and the messages of `env.tools` come first.
        """
        tools = self.tools
        own = [call for call in calls if not self._has_step or call.name in tools or (tools and call.error)]
        others = [call for call in calls if call not in own]
        results, counts = answer_calls(own, tools)
        results = read_messages(results, ("tool",))
        result = StepResult(terminated=not calls)
        if self._has_step and (others or not calls):
            step = self._environment.step
            result = read_step(await_value(step(text, others) if self._takes_calls else step(text)), bool(others))
        told: list[Any] = [*result.messages]
        messages = [*results, *told]
        if [message["role"] for message in told[: len(others)]] == ["tool"] * len(others):
            by_tools, by_environment = iter(results), iter(told)
            messages = [*(next(by_tools if call in own else by_environment) for call in calls), *by_environment]
        if not (messages or result.terminated or result.truncated):
            raise PlugInValueError("returned no message, but the episode continues; return one, or end the episode")
        if (length := sum(len(message["content"]) for message in messages)) > MAX_CHARACTERS:
            raise PlugInValueError(f"returned {length:,} characters, expected at most {MAX_CHARACTERS:,}; shorten it")
        return result._replace(messages=messages, metrics={**result.metrics, **counts})

    def score(self) -> dict[str, float]:
        """Returns the rewards for the whole episode, with their names."""
        method = getattr(self._environment, "score" if self._has_step else "get_reward", None)
        scores = await_value(method()) if callable(method) else None
        if not isinstance(scores, Mapping):
            return {} if scores is None else {"score": to_number(scores)}
        if wrong := [name for name in scores if not isinstance(name, str) or not EXTRA_NAME_PATTERN.fullmatch(name)]:
            raise PlugInValueError(f"returned a score named {wrong[0]!r}, expected 1 to 64 of A-Z a-z 0-9 _ . @ -")
        return {name: to_number(value) for name, value in scores.items()}

    def close(self) -> None:
        if self._is_reset and callable(method := getattr(self._environment, "close", None)):
            await_value(method())


def read_step(result: Any, has_calls: bool) -> StepResult:
    """Converts the return value of a user's `step` into a `StepResult` with checked messages and numbers.

    Args:
        has_calls: whether the turn had tool calls, so that a string becomes a message of a tool.

    Raises:
        PlugInValueError: the value is invalid.
    """
    if isinstance(result, str | list):
        result = StepResult(result)
    if isinstance(result, tuple) and len(result) == 4:  # Gym
        result = (*result[:3], False, result[3])
    if not isinstance(result, tuple) or len(result) != 5:
        raise PlugInValueError(f"step returned {describe_value(result)}, expected a StepResult, or Gym's 4 or 5 values")
    messages, reward, terminated, truncated, metrics = result
    for name, value in (("terminated", terminated), ("truncated", truncated)):
        if value not in (True, False):
            raise PlugInValueError(f"step returned {describe_value(value)} as {name}, expected True or False")
    return StepResult(
        messages=read_messages(messages, ("tool", "user") if has_calls else ("user", "tool")),
        reward=to_number(reward),
        terminated=bool(terminated),
        truncated=bool(truncated),
        metrics=collect_extras(metrics) if isinstance(metrics, Mapping) else {},
    )


def read_messages(value: Any, roles: Sequence[str]) -> list[dict[str, str]]:
    """Returns an observation as messages; a string or a number becomes one message with the first role.

    Raises:
        PlugInValueError: it is not a string, a number, None, or messages with these roles.
    """
    if value is None:
        return []
    if isinstance(value, str | int | float) or getattr(value, "shape", None) == ():  # a number of NumPy
        value = [{"role": roles[0], "content": str(value)}]
    messages = []
    for message in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
            got = describe_value(message)
            raise PlugInValueError(f"returned {got}, expected a string, or messages with a string as 'content'")
        if message.get("role") not in roles:
            role = message.get("role")
            raise PlugInValueError(f"returned a message with role {role!r}, expected {' or '.join(roles)}")
        # Lone surrogates cannot be encoded.
        messages.append({"role": message["role"], "content": message["content"].encode("utf-8", "replace").decode()})
    return messages
