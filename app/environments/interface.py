"""What users write: environments that answer the policy, turn by turn. `from grpo import StepResult, ToolCall`.

    class CountDown:
        def reset(self, *, seed, answer):
            self.left = seed % 3 + 1
            return "Say my number."

        def step(self, text, calls):
            self.left -= 1
            return StepResult("Again.", reward=0.1, terminated=self.left == 0)

`app.environments.adapters` says what else is accepted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

Messages = Sequence[Mapping[str, str]]
"""A chat: dicts with `role` and `content`."""


class ToolCall(NamedTuple):
    """A call that the policy wrote in a turn."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    """Why the call cannot be read; name and arguments may then be empty."""


class StepResult(NamedTuple):
    """What an environment says to a turn of the policy."""

    messages: Messages | str = ()
    """Of the roles `tool` and `user`. A text is one message: of a tool if the turn had calls, else of the user."""
    reward: float = 0.0
    """Reward of this turn."""
    terminated: bool = False
    """Whether the episode has come to its end."""
    truncated: bool = False
    """Whether the episode is cut before its end."""
    metrics: Mapping[str, float] = {}
    """Further numbers to log."""


class Environment(Protocol):
    """One episode; it is made anew for each, without arguments.

    It may also have `score() -> float | Mapping[str, float]`, rewards for the whole episode, and `close()`. Both are
    called once, at its end. All methods of an episode run in one thread, and any of them may be a coroutine function.
    """

    def reset(self, *, seed: int, **columns: Any) -> Messages | str | None:
        """Starts the episode and returns its opening: a chat, the text of the user, or None for the row's prompt.

        Args:
            seed: the same for all samples of a prompt, which must get the same opening.
            columns: the row of the data set. Only the names that the method declares are passed.
        """
        ...

    def step(self, text: str, calls: Sequence[ToolCall]) -> StepResult:
        """Answers a turn of the policy.

        Args:
            text: the whole turn, without control tokens.
            calls: the tool calls in it that are not calls of `env.tools`.
        """
        ...
