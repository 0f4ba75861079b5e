"""What opens an episode, and what its environment answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.plugins.values import Failure
from app.records.sample import Messages


@dataclass(frozen=True)
class EpisodeStart:
    """What opens an episode; the same for all samples of a prompt."""

    seed: int
    columns: Mapping[str, Any]
    """The row of the data set, with `prompt` and `answer`."""


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
    failure: Failure | None = None
    """Fault of the environment, which ends the episode."""
    is_over: bool = False
