"""The records that cross rooms, and the one legend of shape letters.

Ragged on the host, packed on the device: every array below is numpy and has its own sample's
length. Padding exists only inside `app.batching`.

Shape letters, used in every signature and docstring of the project:

    P  prompts            N  samples (P * G)       R  packed rows         B  decode slots
    G  samples per prompt S  prompt tokens         C  completion tokens   T  tokens of a row
    V  vocabulary         D  model width           L  layers              F  feed-forward width
    Q  query heads        K  key/value heads       H  head size
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32

DROPPED_PREFIX = "dropped:"
"""What the `finish_reason` of a sample begins with that must not be used; why follows."""

Messages = list[dict[str, str]]
"""A chat: dicts with `role` and `content`."""


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One question, templated and tokenised. Made by `app.prompts`."""

    uid: str
    """Names the row of the dataset; sampling noise is keyed by it, so it never depends on order."""
    token_ids: Int32[np.ndarray, "S"]
    source: str | Messages
    """What the dataset said, before the chat template."""
    answer: str | None
    """The reference answer, as the dataset spells it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One completion of one prompt, from the sampler to the gradient.

    `rollout` makes it; `score`, `reward` and `advantage` each return copies with their own fields
    filled in (`dataclasses.replace`). A field is None until its room has run.
    """

    prompt: Prompt
    sample_index: int
    """Which of the G samples of its prompt: 0 .. G-1."""
    group_id: int
    """Samples that are compared with each other share it. Explicit: a group may lose members."""
    completion_ids: Int32[np.ndarray, "C"]
    """Includes the end-of-sequence token when `finish_reason` is `stop`."""
    completion: str
    behavior_logprobs: Float32[np.ndarray, "C"]
    """log_softmax(logits / temperature) of the sampler, whole vocabulary, at sampling time."""
    finish_reason: str
    """`stop` (an end-of-sequence token), `length` (cut at `rollout.max_new_tokens`) or `dropped:<why>`."""
    policy_version: int
    """Number of optimizer steps the sampling weights had seen, counted in training steps; of its oldest token."""
    policy_versions: Int32[np.ndarray, "C"] | None = None
    """The same of each token, where generation went on while the weights changed; None = all are `policy_version`."""
    worker: str = "0"
    segments: int = 1
    elapsed_s: float = 0.0
    kept_mass_logs: Float32[np.ndarray, "C"] | None = None
    """log of the probability mass kept by top-k / top-p / min-p; None when nothing is cut."""
    loss_mask: Bool[np.ndarray, "C"] | None = None
    """False on tokens that no loss runs over: not the policy's, or of a dropped sample; None = all True."""
    rewards: Mapping[str, float] | None = None
    """Unweighted value of each reward function that gave one."""
    reward: float | None = None
    """Weighted sum of `rewards`; None also where the sample was dropped for want of them."""
    token_rewards: Float32[np.ndarray, "C"] | None = None
    """What each token earned, where a file says so; None = `reward`, on the last token that the policy wrote."""
    policy_logprobs: Float32[np.ndarray, "C"] | None = None
    reference_logprobs: Float32[np.ndarray, "C"] | None = None
    values: Float32[np.ndarray, "C"] | Float32[np.ndarray, "C+1"] | None = None
    """Of the state before each token; one more, of the state behind the last, where a cut sample is bootstrapped."""
    advantages: Float32[np.ndarray, "C"] | None = None
    returns: Float32[np.ndarray, "C"] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Unknown fields of a sample file, carried through untouched."""

    @property
    def uid(self) -> str:
        return f"{self.prompt.uid}/s{self.sample_index}"

    @property
    def token_versions(self) -> Int32[np.ndarray, "C"]:
        """Of the policy that drew each token."""
        if self.policy_versions is not None:
            return self.policy_versions
        return np.full(len(self.completion_ids), self.policy_version, np.int32)

    @property
    def token_values(self) -> Float32[np.ndarray, "C"]:
        """Without the one behind the last token, which is no token's. The critic must have scored the sample."""
        assert self.values is not None
        return self.values[: len(self.completion_ids)]

    @property
    def mask(self) -> Bool[np.ndarray, "C"]:
        """True where the policy wrote the token: what losses and means run over."""
        if self.loss_mask is None:
            return np.ones(len(self.completion_ids), bool)
        return self.loss_mask
