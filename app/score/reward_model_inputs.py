"""Conversations -> one score each, under a sequence classification model with one label."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int32

from app.records.sample import Sample
from app.score.scorer import with_a_token_behind


def as_read(samples: Sequence[Sample], texts: Sequence[Int32[np.ndarray, "T"]]) -> list[Sample]:
    """The samples with the tokens that the reward model reads, and one behind them.

    The value of their last completion token is the score: it is read at the last token of the conversation. What the
    conversations of a prompt have in common stands as the prompt, so that they may share it.
    """
    shared = _shared_lengths([sample.prompt.uid for sample in samples], texts)
    return [_as_read(s, text, shared[s.prompt.uid]) for s, text in zip(samples, texts, strict=True)]


def _shared_lengths(uids: Sequence[str], texts: Sequence[np.ndarray]) -> Mapping[str, int]:
    """By prompt: how many tokens its conversations begin with alike; at least one, which a completion needs."""
    first: dict[str, np.ndarray] = {}
    shared: dict[str, int] = {}
    for uid, text in zip(uids, texts, strict=True):
        other = first.setdefault(uid, text)[: shared.get(uid, len(text))]
        length = min(len(other), len(text))
        differs = np.flatnonzero(other[:length] != text[:length])
        shared[uid] = max(1, int(differs[0]) if len(differs) else length)
    return shared


def _as_read(sample: Sample, text: np.ndarray, shared: int) -> Sample:
    prompt = replace(sample.prompt, token_ids=text[:shared])
    # Values are read at the token before one.
    return with_a_token_behind(replace(sample, prompt=prompt, completion_ids=text[shared:], loss_mask=None))
