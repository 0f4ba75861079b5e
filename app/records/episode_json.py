"""The field `episode` of a sample's JSON object: the turns of a sample with an environment."""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Bool
from pydantic import TypeAdapter, ValidationError

from app.records.sample import EPISODE_ENDS, Episode
from settings.errors import InputError

EPISODE = TypeAdapter(Episode)


def episode_from_record(record: Any, mask: Bool[np.ndarray, "C"], *, where: str) -> Episode:
    """Returns the episode of a sample.

    Args:
        mask: `loss_mask` of the sample.

    Raises:
        InputError: a field has the wrong type or range, the turns are not in order or outside the completion, or a
            token between them counts as the policy's.
    """
    try:
        episode = EPISODE.validate_python(record)
    except ValidationError as error:
        [problem, *_] = error.errors(include_url=False)
        place = ".".join(map(str, ("episode", *problem["loc"])))
        raise InputError(f"{where}: {place}: {problem['msg']}, got {problem['input']!r:.40}") from None
    if episode.end not in EPISODE_ENDS:
        raise InputError(f"{where}: episode.end: expected one of {', '.join(EPISODE_ENDS)}, got {episode.end!r:.40}")
    place = 0
    for number, turn in enumerate(episode.turns):
        if not place <= turn.start <= turn.end <= len(mask):
            raise InputError(
                f"{where}: episode.turns.{number} is from {turn.start} to {turn.end}; turns follow each other, so "
                f"expected {place} <= start <= end <= {len(mask)}, the number of completion_token_ids"
            )
        place = turn.end
    if len(wrong := np.flatnonzero(mask & ~episode.written_mask(len(mask)))):
        raise InputError(
            f"{where}: loss_mask[{wrong[0]}] is true, but that token is in no turn of the policy (episode.turns); "
            "tokens of observations are false"
        )
    return episode
