"""An episode as the trainer knows it: what opens it, what was played, and what is still to be answered."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from app.environments.interface import Answer
from app.plugins.printable import one_line
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


FIELDS = {"reset": ("messages",), "step": Answer._fields, "score": ("scores",), "close": ()}
"""What a worker answers to each kind of request."""


@dataclass(eq=False)
class Request:
    """A request to the environment of an episode, and its answer once it is known."""

    do: Literal["reset", "step", "score", "close"]
    fields: Mapping[str, Any]
    is_last: bool = False
    """Whether the episode ends with the answer, whatever it is."""
    answer: dict[str, Any] | None = None

    def read(self, answer: Mapping[str, Any]) -> dict[str, Any] | EpisodeFailure:
        """Returns the fields of a worker's answer, or why the episode cannot go on with it.

        Raises:
            KeyError, TypeError, ValueError: this is no answer to such a request.
        """
        if "failure" in answer:
            kind, detail = answer["failure"]
            return EpisodeFailure(str(kind), one_line(redact(detail)))
        fields = {name: answer[name] for name in FIELDS[self.do]}
        if fields.get("messages"):
            fields["messages"] = [{key: redact(text) for key, text in one.items()} for one in fields["messages"]]
        if self.answer and any(self.answer[name] != fields[name] for name in fields if name != "metrics"):
            opening = EpisodeFailure("opening", "gave another opening for the same seed and row")
            replay = EpisodeFailure("replay", "gave another answer when the same turns were played again")
            return opening if self.do == "reset" else replay
        return fields


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
