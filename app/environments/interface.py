"""The interface of user environments, which answer the policy turn by turn.

User code imports the classes with `from grpo import StepResult, ToolCall`:

    class CountDown:
        def reset(self, *, seed, answer):
            self.left = seed % 3 + 1
            return "Say my number."

        def step(self, text, calls):
            self.left -= 1
            return StepResult("Again.", reward=0.1, terminated=self.left == 0)

See `app.environments.adapters` for other accepted interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Messages = Sequence[Mapping[str, str]]
"""A chat: dicts with `role` and `content`."""


class ToolCall(NamedTuple):
    """A tool call that the policy wrote in a turn."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    """Why the call cannot be parsed; name and arguments may then be empty."""


class StepResult(NamedTuple):
    """An environment's answer to a turn of the policy."""

    messages: Messages | str = ()
    """Messages with role `tool` or `user`. A string becomes one: `tool` if the turn had calls, else `user`."""
    reward: float = 0.0
    """Reward of this turn."""
    terminated: bool = False
    """Whether the episode has reached its end."""
    truncated: bool = False
    """Whether the episode was cut off before its end, as by a limit on turns."""
    metrics: Mapping[str, float] = {}
    """Additional numbers to log."""


class Environment(Protocol):
    """One episode of an environment. A user's class is instantiated without arguments for each episode.

    It may also have `score() -> float | Mapping[str, float]`, which returns rewards for the whole episode, and
    `close()`. Both are called once, at the end of the episode. All methods of an episode run in one thread, and any of
    them may be a coroutine function.
    """

    def reset(self, *, seed: int, **columns: Any) -> Messages | str | None:
        """Starts the episode and returns its first messages, the text of a user message, or None for the row's prompt.

        Args:
            seed: equal for all samples of a prompt; they must also get equal openings.
            columns: the data row's columns that are parameters of the method, or all for a method with `**columns`.
        """
        ...

    def step(self, text: str, calls: Sequence[ToolCall]) -> StepResult:
        """Answers a turn of the policy.

        Args:
            text: the whole turn, without control tokens.
            calls: the tool calls in it, except calls of `env.tools`.
        """
        ...
