"""Makes samples with several turns."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from app.records.sample import Episode, Sample, Turn
from tests.tiny import make_sample


def with_turns(
    lengths: Sequence[tuple[int, int]],
    rewards: Sequence[float] = (),
    *,
    scores: Mapping[str, float] | None = None,
    end: str = "terminated",
    ids: Sequence[int] | None = None,
    metrics: Sequence[Mapping[str, float]] = (),
    **fields: Any,
) -> Sample:
    """Returns a sample whose turns, and the observations after them, have these numbers of tokens."""
    turns, start = [], 0
    for i, (written, observed) in enumerate(lengths):
        turns.append(
            Turn(
                start=start,
                end=start + written,
                messages=[{"role": "tool", "content": f"observation {i}"}] if observed else [],
                reward=rewards[i] if rewards else 0.0,
                seconds=float(i + 1),
                text=f"turn {i}",
                metrics=metrics[i] if metrics else {},
            )
        )
        start += written + observed
    sample = make_sample(np.arange(start) if ids is None else ids, **fields)
    sample = replace(
        sample,
        completion=turns[-1].text,
        finish_reason="stop" if end == "terminated" else "length",
        episode=Episode(tuple(turns), end, scores or {}),
    )
    return replace(sample, loss_mask=sample.written_mask)
