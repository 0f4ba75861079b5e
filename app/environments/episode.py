"""An episode as the trainer knows it: what opens it, what was played, and what is still to be answered."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from app.records.sample import Messages
from settings.loading.secrets import redact


@dataclass(frozen=True)
class EpisodeStart:
    """What opens an episode; the same for all samples of a prompt."""

    seed: int
    columns: Mapping[str, Any]
    """The row of the data set, with `prompt` and `answer`."""


class EpisodeFailure(NamedTuple):
    """A fault of an environment, which costs its own episode."""

    kind: str
    """`raised`, `value` (returned something unusable), `timeout`, `exit` (ended its process), `memory`, `opening`
    (differs from that of the other samples) or `replay` (gave another answer to the same turn)."""
    detail: str
    """One line for people."""


class EpisodeReply(NamedTuple):
    """What an environment said to a turn, and to the whole episode if it is over."""

    key: str
    messages: Messages = []  # noqa: RUF012  (never changed)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = {}
    scores: Mapping[str, float] = {}
    """Rewards for the whole episode by name; only in the reply that ends it."""
    seconds: float = 0.0
    """Time that the environment took, without waiting for a free worker and without replays."""
    failure: str | None = None
    """Kind of the fault of the environment, which ends the episode; see `EpisodeFailure`."""
    detail: str = ""
    """One line for people about the failure."""


@dataclass(eq=False)
class Request:
    """A request to the environment of an episode, and its answer once it is known."""

    do: Literal["reset", "step", "score", "close"]
    fields: Mapping[str, Any]
    is_last: bool = False
    """Whether the episode ends with the answer, whatever it is."""
    answer: dict[str, Any] | None = None


class Episode:
    """The requests of an episode. After the loss of its process, those that were answered are played again.

    Args:
        number: its name towards the worker.
        key: its name towards the sampler.
        opening: `messages` of the answer to `reset`; absent if the opening is what is asked for.
    """

    def __init__(self, number: int, key: str, start: EpisodeStart, **opening: Messages | None) -> None:
        self.number = number
        self.key = key
        self.asks_opening = not opening
        self.todo = deque([Request("reset", {"seed": start.seed, "columns": start.columns}, answer=opening or None)])
        self.current: Request | None = None
        """The request that its worker is answering."""
        self.played: list[Request] = []
        self.reply = EpisodeReply(key)
        """The reply to the last turn, which waits for the scores."""
        self.is_wanted = True
        """Whether anybody waits for its replies; otherwise it only closes."""
        self.is_suspect = False
        """Whether it may have ended its process; it then runs alone."""
        self.num_losses = 0
        self.seconds = 0.0
        """Time of all steps so far."""
        self.sent_at = 0.0
        self.deadline = math.inf

    @property
    def is_idle(self) -> bool:
        return not self.todo and self.current is None

    @property
    def is_awaited(self) -> bool:
        """Whether a request waits for its first answer."""
        return any(request and request.answer is None for request in (self.current, *self.todo))

    def rewind(self) -> None:
        """Puts the answered requests before the others, for a new process."""
        self.todo = deque([*self.played, *self.todo])
        self.played = []

    def leave(self) -> None:
        """Lets nothing but `close` follow the current request."""
        self.is_wanted = False
        self.todo = deque([Request("close", {})])


COMPARED = ("messages", "reward", "terminated", "truncated")


def difference(request: Request, answer: Mapping[str, Any]) -> EpisodeFailure | None:
    """Returns why a repeated request may not have this answer, or None if it is the same as before."""
    assert request.answer is not None
    if all(request.answer.get(name) == answer.get(name) for name in COMPARED):
        return None
    if request.do == "reset":
        return EpisodeFailure("opening", "gave another opening for the same seed and row")
    return EpisodeFailure("replay", "gave another answer when the same turns were played again")


def read_answer(do: str, answer: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a worker's answer, all checked, because the environment could write to the same pipe.

    Raises:
        ValueError, KeyError, TypeError: this is no answer to such a request.
    """
    match do:
        case "reset":
            messages = answer["messages"]
            return {"messages": None if messages is None else _read_messages(messages)}
        case "step":
            if not isinstance(answer["terminated"], bool) or not isinstance(answer["truncated"], bool):
                raise ValueError
            return {
                "messages": _read_messages(answer["messages"]),
                "reward": _read_number(answer["reward"]),
                "terminated": answer["terminated"],
                "truncated": answer["truncated"],
                "metrics": {name: _read_number(value) for name, value in dict(answer["metrics"]).items()},
            }
        case "score":
            return {"scores": {name: _read_number(value) for name, value in dict(answer["scores"]).items()}}
        case _:
            return {}


def _read_messages(messages: Sequence[Mapping[str, str]]) -> Messages:
    read = [{name: redact(text) for name, text in message.items()} for message in map(dict, messages)]
    if not all("role" in message and "content" in message for message in read):
        raise ValueError
    return read


def _read_number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(value):
        raise ValueError
    return float(value)
