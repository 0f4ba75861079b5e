"""An episode as the trainer knows it: what opens it, what was played, and what is still to be answered."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter

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


REPLY = TypeAdapter(EpisodeReply)


@dataclass(eq=False)
class Request:
    """A request to the environment of an episode, and its reply once it is known."""

    do: Literal["reset", "step", "score", "close"]
    fields: Mapping[str, Any]
    is_last: bool = False
    """Whether the episode ends with the reply, whatever it is."""
    reply: EpisodeReply | None = None


@dataclass(eq=False)
class Episode:
    """The requests of an episode. After the loss of its process, those that were answered are played again."""

    key: str
    """Its name towards the sampler."""
    replies: list[EpisodeReply]
    """Takes its replies."""
    requests: list[Request]
    """From its start on, the first `num_sent` of which its worker has got."""
    number: int = field(default_factory=itertools.count().__next__)
    """Its name towards the worker."""
    num_sent: int = 0
    current: Request | None = None
    """The one that its worker is answering."""
    failure: EpisodeReply | None = None
    """Why it is over, if nobody waited for a reply at that time."""
    is_wanted: bool = True
    """Whether anybody waits for its replies; otherwise it only closes."""
    is_suspect: bool = False
    """Whether it may have ended its process; it then runs alone."""
    seconds: float = 0.0
    """Time of all steps so far."""
    sent_at: float = 0.0

    def read(self, answer: Mapping[str, Any]) -> EpisodeReply:
        """Returns a worker's answer as a reply; raises ValueError if it is none."""
        reply = REPLY.validate_python({**answer, "key": self.key})
        messages = [{key: redact(text) for key, text in message.items()} for message in reply.messages]
        return reply._replace(messages=messages, detail=one_line(redact(reply.detail)))

    def leave(self) -> None:
        """Lets nothing but `close` follow what was sent."""
        self.is_wanted = False
        self.requests[self.num_sent :] = [Request("close", {}, is_last=True)]
