"""Inputs of a reward model: a sequence classifier with one label, which gives each conversation one score."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Int32

from app.records.sample import Sample
from app.score.scorer import append_dummy_token


def reward_model_inputs(samples: Sequence[Sample], conversations: Sequence[Int32[np.ndarray, "T"]]) -> list[Sample]:
    """Returns the samples with the conversations as their tokens, followed by one dummy token.

    The value of the dummy token is the score, because it is read at the last token of the conversation. The common
    prefix of a prompt's conversations becomes the prompt, so that they can share it.
    """
    shared = _shared_lengths([sample.prompt.uid for sample in samples], conversations)
    return [_reward_model_input(s, text, shared[s.prompt.uid]) for s, text in zip(samples, conversations, strict=True)]


def _shared_lengths(uids: Sequence[str], conversations: Sequence[np.ndarray]) -> Mapping[str, int]:
    """Returns the length of the common prefix of each prompt's conversations; at least one token."""
    first: dict[str, np.ndarray] = {}
    shared: dict[str, int] = {}
    for uid, text in zip(uids, conversations, strict=True):
        other = first.setdefault(uid, text)[: shared.get(uid, len(text))]
        length = min(len(other), len(text))
        differs = np.flatnonzero(other[:length] != text[:length])
        shared[uid] = max(1, int(differs[0]) if len(differs) else length)
    return shared


def _reward_model_input(sample: Sample, conversation: np.ndarray, shared_length: int) -> Sample:
    prompt = replace(sample.prompt, token_ids=conversation[:shared_length])
    # The value of a token is read at the token before it.
    return append_dummy_token(
        replace(sample, prompt=prompt, completion_ids=conversation[shared_length:], loss_mask=None)
    )
