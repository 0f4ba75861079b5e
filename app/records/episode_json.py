"""The field `episode` of a sample's JSON object: the turns of a sample with an environment."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import Bool
from pydantic import BaseModel, ConfigDict, Field

from app.records.sample import EPISODE_ENDS, Episode, Turn
from settings.errors import InputError

FLOAT32_MAX = float(np.finfo(np.float32).max)
Float32 = Annotated[float, Field(ge=-FLOAT32_MAX, le=FLOAT32_MAX)]
Number = Annotated[Float32, Field(description="a finite float32 number")]
Numbers = Annotated[dict[str, Float32], Field(description="an object of finite float32 numbers")]
Place = Annotated[int, Field(ge=0, description="a place among the completion's tokens (an integer >= 0)")]


class MessageRecord(BaseModel):
    """A message of an observation."""

    model_config = ConfigDict(strict=True, extra="forbid")

    role: Annotated[Literal["tool", "user"], Field(description="`tool` or `user`")]
    content: Annotated[str, Field(description="a string")]


class TurnRecord(BaseModel):
    """A turn of the policy; see `Turn`."""

    model_config = ConfigDict(strict=True)

    start: Place
    end: Place
    text: Annotated[str, Field(description="a string")]
    messages: Annotated[list[MessageRecord], Field(description="messages with `role` and `content`")] = []
    reward: Number = 0.0
    seconds: Annotated[Float32, Field(ge=0, description="a number >= 0")] = 0.0
    metrics: Numbers = {}


class EpisodeRecord(BaseModel):
    """An episode; see `Episode`."""

    model_config = ConfigDict(strict=True)

    turns: Annotated[list[TurnRecord], Field(description="turns with `start`, `end` and `text`")]
    end: Annotated[str, Field(pattern=f"^({'|'.join(EPISODE_ENDS)})$", description=f"one of {', '.join(EPISODE_ENDS)}")]
    scores: Numbers = {}


NESTED_RECORDS: dict[str, type[BaseModel]] = {
    "episode": EpisodeRecord,
    "turns": TurnRecord,
    "messages": MessageRecord,
}
"""The models of the objects inside, by the names of the fields that hold them."""


def episode_to_record(episode: Episode) -> dict[str, Any]:
    """Returns the episode as a JSON object."""
    names = TurnRecord.model_fields
    turns = [{name: getattr(turn, name) for name in names} | {"metrics": dict(turn.metrics)} for turn in episode.turns]
    return {"turns": turns, "end": episode.end, "scores": dict(episode.scores)}


def episode_from_record(record: EpisodeRecord, mask: Bool[np.ndarray, "C"], *, where: str) -> Episode:
    """Returns the episode of a sample.

    Args:
        mask: `loss_mask` of the sample.

    Raises:
        InputError: the turns are not in order or outside the completion, or a token between them counts as the
            policy's.
    """
    place = 0
    for number, turn in enumerate(record.turns):
        name = f"{where}: episode.turns[{number}]"
        if not place <= turn.start <= turn.end <= len(mask):
            raise InputError(
                f"{name} is from {turn.start} to {turn.end}; turns follow each other, so expected {place} <= start <= "
                f"end <= {len(mask)}, the number of completion_token_ids"
            )
        place = turn.end
    turns = tuple(Turn(**turn.model_dump()) for turn in record.turns)
    episode = Episode(turns, record.end, record.scores)
    if len(wrong := np.flatnonzero(mask & ~episode.written_mask(len(mask)))):
        raise InputError(
            f"{where}: loss_mask[{wrong[0]}] is true, but that token is in no turn of the policy (episode.turns); "
            "tokens of observations are false"
        )
    return episode
