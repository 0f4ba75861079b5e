"""The records that packages pass to each other, and the legend of shape letters.

Samples are ragged on the host and packed on devices: every array below is numpy and has the length of its sample.
Padding exists only inside `app.batching`.

Shape letters, used in every signature and docstring of the project:

    P  prompts            N  samples (P * G)       R  packed rows         B  decode slots
    G  samples per prompt S  prompt tokens         C  completion tokens   T  tokens of a row
    V  vocabulary         D  model width           L  layers              F  feed-forward width
    Q  query heads        K  key/value heads       H  head size
    E  experts of a layer k  experts of a token    M  rows sorted by expert (T * k)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt8
from pydantic import FiniteFloat, NonNegativeFloat, NonNegativeInt

DROPPED_PREFIX = "dropped:"
"""The prefix of `finish_reason` of a sample that must not be used; the reason follows."""

Messages = list[dict[str, Any]]
"""A chat: dicts with `role`, `content` (text, parts of text, or None) and any other fields that the chat template
reads."""


def message_text(message: Mapping[str, Any]) -> str:
    """Returns a readable form of a chat message: its text or text parts, and its tool calls."""
    content, calls = message.get("content"), message.get("tool_calls")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    texts = [part.get("text", "") for part in parts if isinstance(part, Mapping)]
    return "".join(map(str, [*texts, json.dumps(calls, ensure_ascii=False) if calls else ""]))


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """A question, rendered with the chat template and tokenized by `app.prompts`."""

    uid: str
    """The name of the data set's row. The random numbers of sampling depend on it, and so not on the order of
    prompts."""
    token_ids: Int32[np.ndarray, "S"]
    source: str | Messages
    """The data set's text or chat, before the chat template is applied."""
    answer: Any
    """The reference answer, as in the dataset: JSON of any type (see `app.records.typed_values`), None without one."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """All other columns of the row, as JSON."""


@dataclass(frozen=True, slots=True)
class Turn:
    """The policy's tokens between two observations, and the environment's answer."""

    start: NonNegativeInt
    """Index of its first token in the completion."""
    end: NonNegativeInt
    """Index after its last token. The observation, if any, is from here to the start of the next turn."""
    messages: list[dict[str, str]] = field(default_factory=list)
    """The observation: messages with role `tool` or `user`; empty if the environment did not answer."""
    reward: FiniteFloat = 0.0
    """Reward of the environment for this turn."""
    seconds: NonNegativeFloat = 0.0
    """Time that the environment took to answer."""
    text: str = field(kw_only=True)
    """The policy's text, without control tokens."""
    metrics: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """Numbers reported by the environment, including `tool_calls` and `tool_errors` (calls that failed)."""


EPISODE_ENDS = ("terminated", "truncated", "turns", "turn_tokens", "tokens", "observation", "dropped")
"""Values of `Episode.end`."""


@dataclass(frozen=True, slots=True)
class Episode:
    """The turns of a multi-turn sample, their rewards, and how it ended."""

    turns: tuple[Turn, ...]
    """All turns of the policy, in order; the last one may be truncated."""
    end: str
    """Why the episode ended: `terminated` or `truncated` by the environment, `turns` (env.max_turns), `turn_tokens`
    (env.max_turn_tokens), `tokens` (rollout.max_new_tokens), `observation` (it did not fit), or `dropped`."""
    scores: Mapping[str, FiniteFloat] = field(default_factory=dict)
    """Named parts of the reward that the environment gave for the whole episode."""

    @property
    def reward(self) -> float:
        """Sum of the rewards of all turns and of all scores."""
        return sum(turn.reward for turn in self.turns) + sum(self.scores.values())

    def written_mask(self, num_tokens: int) -> Bool[np.ndarray, "C"]:
        """Returns a mask that is True on the tokens of the policy's turns, even on those that the loss leaves out."""
        mask = np.zeros(num_tokens, bool)
        for turn in self.turns:
            mask[turn.start : turn.end] = True
        return mask


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """A completion of a prompt, from the sampler to the gradient.

    `rollout` creates it; `score`, `reward` and `advantage` return copies with further fields (`dataclasses.replace`). A
    field is None until its stage has run.
    """

    prompt: Prompt
    sample_index: int
    """The index among the G samples of its prompt: 0 .. G-1."""
    group_id: int
    """The group of samples that are compared with each other; explicit, since a group may lose members."""
    completion_ids: Int32[np.ndarray, "C"]
    """Token ids, with the EOS token or the stop string if `finish_reason` is `stop`."""
    completion: str
    """The policy's text in its last turn, without control tokens: the text that rewards grade."""
    behavior_logprobs: Float32[np.ndarray, "C"]
    """log_softmax(logits / temperature) of the sampler over the whole vocabulary, at sampling time."""
    finish_reason: str
    """`stop` (EOS token or stop string), `length` (truncated at `rollout.max_new_tokens`, or by the limit in
    `episode.end`) or `dropped:<why>`."""
    policy_version: int
    """The training step of the weights that sampled the oldest token."""
    policy_versions: Int32[np.ndarray, "C"] | None = None
    """The version for each token, if the weights changed during generation; None = `policy_version` for all."""
    worker: str = "0"
    segments: int = 1
    elapsed_s: float = 0.0
    kept_mass_logs: Float32[np.ndarray, "C"] | None = None
    """The log of the probability mass kept by top-k / top-p / min-p; None if nothing is truncated."""
    routes: UInt8[np.ndarray, "S+C L k"] | None = None
    """The experts that the sampler chose for each token of prompt and completion; 255 where none are recorded, as for
    the last token, which the sampler does not process. None = routes are not recorded."""
    episode: Episode | None = None
    """The sample's turns and their rewards; None without an environment, when the completion is a single turn."""
    loss_mask: Bool[np.ndarray, "C"] | None = None
    """False on tokens outside the loss: not written by the policy, or in a dropped sample; None = all True."""
    rewards: Mapping[str, float] | None = None
    """The unweighted value of each reward function that returned one."""
    reward: float | None = None
    """The weighted sum of `rewards`; None also if the sample was dropped without rewards."""
    token_rewards: Float32[np.ndarray, "C"] | None = None
    """The reward of each token, if each turn has a reward or a sample file has this field; None = `reward` on the last
    token that the policy wrote."""
    policy_logprobs: Float32[np.ndarray, "C"] | None = None
    reference_logprobs: Float32[np.ndarray, "C"] | None = None
    values: Float32[np.ndarray, "C"] | Float32[np.ndarray, "C+1"] | None = None
    """The value of the state before each token, and after the last one if a truncated sample is bootstrapped."""
    advantages: Float32[np.ndarray, "C"] | None = None
    returns: Float32[np.ndarray, "C"] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Unknown fields of a sample file, carried through untouched."""

    @property
    def uid(self) -> str:
        return f"{self.prompt.uid}/s{self.sample_index}"

    def with_prompt(self, prompt: Prompt) -> Sample | None:
        """Returns this sample, read from a file, with the complete `prompt`; None if it belongs to another prompt.

        Tokens with which an environment opened the conversation are kept.
        """
        if self.episode is not None:
            prompt = replace(prompt, source=self.prompt.source, token_ids=self.prompt.token_ids)
        return replace(self, prompt=prompt) if np.array_equal(self.prompt.token_ids, prompt.token_ids) else None

    @property
    def token_policy_versions(self) -> Int32[np.ndarray, "C"]:
        """The version of the policy that sampled each token."""
        if self.policy_versions is not None:
            return self.policy_versions
        return np.full(len(self.completion_ids), self.policy_version, np.int32)

    @property
    def last_turn_ids(self) -> Int32[np.ndarray, "T"]:
        """The token ids of the last turn, whose text is `completion`."""
        if self.episode is None:
            return self.completion_ids
        turns = self.episode.turns
        return self.completion_ids[turns[-1].start : turns[-1].end] if turns else self.completion_ids[:0]

    @property
    def written_mask(self) -> Bool[np.ndarray, "C"] | None:
        """A `loss_mask` that is False only on observations; None = all True."""
        return None if self.episode is None else self.episode.written_mask(len(self.completion_ids))

    @property
    def turn_places(self) -> Int64[np.ndarray, "turns"]:
        """For each turn, the index of its last token in the loss; empty if no token of the sample is in the loss.

        A turn without such a token gets the index of an earlier turn, or else of the sample's first token in the loss.
        Without an episode, there is one turn.
        """
        ends = [len(self.completion_ids)] if self.episode is None else [turn.end for turn in self.episode.turns]
        written = np.flatnonzero(self.mask)
        return written[np.maximum(np.searchsorted(written, ends) - 1, 0)] if len(written) else written

    @property
    def conversation(self) -> Messages:
        """The whole chat: the prompt, and every turn of the policy with the messages that answered it."""
        source = self.prompt.source
        messages = [{"role": "user", "content": source}] if isinstance(source, str) else list(source)
        if self.episode is None:
            return [*messages, {"role": "assistant", "content": self.completion}]
        for turn in self.episode.turns:
            messages += [{"role": "assistant", "content": turn.text}, *turn.messages]
        return messages

    @property
    def token_values(self) -> Float32[np.ndarray, "C"]:
        """The value of the state before each token, without the value after the last token. Requires `values`."""
        assert self.values is not None
        return self.values[: len(self.completion_ids)]

    @property
    def mask(self) -> Bool[np.ndarray, "C"]:
        """True on tokens that losses and means include: `loss_mask`, or all True if that is None."""
        if self.loss_mask is None:
            return np.ones(len(self.completion_ids), bool)
        return self.loss_mask


def group_indices(samples: Sequence[Sample]) -> list[tuple[int, ...]]:
    """Returns the indices of each group's samples, in the order of the groups' first samples."""
    groups: dict[int, list[int]] = {}
    for index, sample in enumerate(samples):
        groups.setdefault(sample.group_id, []).append(index)
    return [tuple(group) for group in groups.values()]


def group_samples(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Returns the samples of each group, in the order of the groups' first samples."""
    return [[samples[i] for i in group] for group in group_indices(samples)]
