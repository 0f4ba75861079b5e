"""The state of a sample during generation, in a slot or suspended."""

from __future__ import annotations

import time
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Int32, UInt8

from app.distributed.collectives import gather_json_over_hosts
from app.environments.episode_pool import EpisodeStart
from app.model.architecture import RouteShape
from app.model.experts import UNRECORDED, unpack_routes
from app.model.kv_cache import KVCache
from app.plugins.values import Failure
from app.records.sample import Episode, Messages, Prompt, Sample, Turn
from app.rollout.request import GenerationRequest

DecodeText = Callable[[Sequence[int]], str]
"""Converts token ids to text."""


class Opening(NamedTuple):
    """The start of a conversation with an environment, before the policy's first turn."""

    prompt: Prompt
    """The prompt that the policy reads first."""
    start: EpisodeStart
    messages: Messages | None
    """The environment's first messages; None = the conversation starts with the prompt of the data set."""
    failure: Failure | None = None
    """Why the environment failed to open the conversation; None if it opened."""


@dataclass(eq=False)
class RolloutSequence:
    """A sample during generation, called a row, with one array of tokens per segment so far."""

    prompt: Prompt
    sample_index: int
    max_new_tokens: int
    noise_step: int
    """Policy version in its PRNG key. It never changes, though newer weights may sample some of the tokens."""
    num_tokens: int = 0
    """Number of completion tokens so far."""
    num_segments: int = 0
    started_s: float = 0.0
    """Time of its first admission, by `time.perf_counter`."""
    elapsed_s: float = 0.0
    """Seconds from its first admission until it was done."""
    finish_reason: str | None = None
    """`stop`, `length` or `dropped:<why>` once it is done."""
    worker: str = ""
    """Name of its last worker, or the process index if there are no workers."""
    segment_tokens: list[np.ndarray] = field(default_factory=list)
    """Tokens of each segment, int32 [3 + words, tokens]: ids, bits of the logprobs, bits of the kept-mass logs and, if
    recorded, the routes of each preceding token (its experts)."""
    segment_versions: list[tuple[int, int]] = field(default_factory=list)
    """(version of the weights, number of tokens) for each entry of `segment_tokens`."""
    prompt_routes: Int32[np.ndarray, "S words"] | None = None
    """Routes of the prompt's tokens, if they are recorded."""
    plays: bool = False
    """Whether an environment answers its turns."""
    opening: Opening | None = None
    """How its conversation starts; None without an environment."""
    max_turn_tokens: int | None = None
    """Maximum number of tokens per turn; None = no limit except the sample's."""
    turns: tuple[Turn, ...] = ()
    """Turns that the environment has answered."""
    turn_start: int = 0
    """Index of the first token of the current turn."""
    turn_end: str | None = None
    """How the turn ended, `stop` or `length`, while the row waits for its environment; otherwise None."""
    episode: Episode | None = None
    """All turns, once the sample is done; None without an environment."""
    name: str = ""
    """Unique name of the row in its rollout, by which the scheduler refers to it."""
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Unique key of the row, which its copies share."""

    @property
    def uid(self) -> str:
        return f"{self.prompt.uid}/s{self.sample_index}"

    @property
    def is_acting(self) -> bool:
        """Whether the row waits for its environment."""
        return self.turn_end is not None and self.finish_reason is None

    @property
    def num_allowed(self) -> int:
        """Number of tokens that may still be sampled in this turn."""
        left = self.max_new_tokens - self.num_tokens
        of_turn = self.num_tokens - self.turn_start
        return left if self.max_turn_tokens is None else min(left, self.max_turn_tokens - of_turn)

    def observe(self, turn: Turn, token_ids: Int32[np.ndarray, "n"]) -> None:
        """Appends the observation that answers a finished turn, and starts the next turn."""
        observed = np.zeros((len(self.segment_tokens[0]), len(token_ids)), np.int32)
        observed[0] = token_ids
        self.segment_tokens.append(observed)
        self.segment_versions.append((self.segment_versions[-1][0], len(token_ids)))
        self.num_tokens += len(token_ids)
        self.turns, self.turn_start, self.turn_end = (*self.turns, turn), self.num_tokens, None

    def finish(self, reason: str) -> None:
        self.finish_reason, self.elapsed_s = reason, time.perf_counter() - self.started_s

    @property
    def token_ids(self) -> Int32[np.ndarray, "C"]:
        return self._field(0)

    @property
    def logprobs(self) -> Float32[np.ndarray, "C"]:
        return self._field(1).view(np.float32)

    @property
    def kept_mass_logs(self) -> Float32[np.ndarray, "C"]:
        return self._field(2).view(np.float32)

    @property
    def policy_versions(self) -> Int32[np.ndarray, "C"]:
        """Version of the weights that sampled each token."""
        versions, counts = np.asarray(self.segment_versions, np.int32).reshape(-1, 2).T
        return np.repeat(versions, counts)

    def _field(self, number: int) -> Int32[np.ndarray, "C"]:
        return np.concatenate([np.zeros(0, np.int32), *(drawn[number] for drawn in self.segment_tokens)])

    def routes(self, shape: RouteShape) -> UInt8[np.ndarray, "S+C L k"]:
        """Returns the experts of each token; `UNRECORDED` where none are recorded, such as for the last token."""
        length = len(self.prompt.token_ids)
        routes = np.full((length + self.num_tokens, *shape), UNRECORDED, np.uint8)
        if self.prompt_routes is not None:
            routes[:length] = unpack_routes(self.prompt_routes, shape)
        first = length - 1
        for drawn in self.segment_tokens:
            end = first + drawn.shape[1]
            routes[first:end] = unpack_routes(drawn[3:].T, shape)
            first = end
        return routes

    @property
    def is_collected(self) -> bool:
        """Whether all sampled tokens have been copied from the devices."""
        return sum(count for _, count in self.segment_versions) == self.num_tokens

    def newly_contains(self, stop: tuple[str, ...], stop_text: DecodeText) -> bool:
        """Returns whether a stop string ends in the last collected segment; it may begin in an earlier one."""
        if not stop or not self.segment_tokens:
            return False
        ids, overlap = self.token_ids.tolist(), max(len(string.encode()) for string in stop)
        last = ids[-(self.segment_tokens[-1].shape[1] + overlap) :]
        # The text of the last tokens may differ in isolation, so the text of all tokens decides.
        return all(stop_length(some, stop, stop_text) is not None for some in (last, ids))

    def to_sample(
        self, group_id: int, request: GenerationRequest, *, decode_text: DecodeText, stop_text: DecodeText
    ) -> Sample:
        """Returns the record of a finished row, cut after the token that completes the first stop string."""
        length = stop_length(self.token_ids.tolist(), request.stop, stop_text)
        row = self if length is None else replace(self.rewound(length), finish_reason="stop")
        assert row.finish_reason is not None
        ids, versions = row.token_ids, row.policy_versions
        # A sample without a token gets the version of the segment that dropped it.
        last = row.segment_versions[-1][0] if row.segment_versions else row.noise_step
        oldest = int(versions.min()) if len(versions) else last
        start = 0 if row.episode is None else row.episode.turns[-1].start
        return Sample(
            prompt=self.prompt,
            sample_index=self.sample_index,
            group_id=group_id,
            completion_ids=ids,
            completion=decode_text(ids[start:].tolist()),
            behavior_logprobs=row.logprobs,
            finish_reason=row.finish_reason,
            policy_version=oldest,
            policy_versions=versions if (versions > oldest).any() else None,
            worker=self.worker,
            segments=row.num_segments,
            elapsed_s=self.elapsed_s,
            kept_mass_logs=row.kept_mass_logs if request.rules.truncates else None,
            routes=None if request.route_shape is None else row.routes(request.route_shape),
            episode=row.episode,
            loss_mask=row.episode and row.episode.written_mask(len(ids)),
        )

    def rewound(self, num_tokens: int) -> RolloutSequence:
        """Returns a copy with the first `num_tokens` collected tokens."""
        row = replace(
            self,
            num_tokens=0,
            num_segments=0,
            finish_reason=None,
            turn_end=None,
            segment_tokens=[],
            segment_versions=[],
        )
        for drawn, (version, count) in zip(self.segment_tokens, self.segment_versions, strict=False):
            left = min(count, num_tokens - row.num_tokens)
            if left > 0:
                row.segment_tokens.append(drawn[:, :left])
                row.segment_versions.append((version, left))
                row.num_tokens += left
                row.num_segments += 1
        # Observations were not decoded in segments.
        row.num_segments -= len(row.turns)
        return row


class SuspendedSequence(NamedTuple):
    """A sample that is not in a slot, with its KV cache if it has one."""

    row: RolloutSequence
    cache: KVCache | None = None
    """The cache, on the devices where the row ran; None = it must be computed from the tokens."""
    length: int = 0
    """Number of prompt and completion tokens in the cache, plus 1 for the next token to decode."""


def make_sequences(prompts: Sequence[Prompt], request: GenerationRequest, *, noise_step: int) -> list[RolloutSequence]:
    """Returns `group_size` rows without completion tokens for each prompt, in order.

    Args:
        noise_step: policy version for the PRNG keys of the rows.
    """
    group_size = request.group_size
    limits = np.broadcast_to(request.max_new_tokens, len(prompts) * group_size).tolist()
    return [
        RolloutSequence(prompts[i // group_size], i % group_size, max_new_tokens=limit, noise_step=noise_step)
        for i, limit in enumerate(limits)
    ]


def gather_sequences(own: Sequence[RolloutSequence]) -> list[RolloutSequence]:
    """Returns the new rows of all hosts, interleaved, in the same order on every host. All hosts must call it together.

    In rows of other hosts, only the fields on which the tokens depend are filled.
    """
    prompts = {id(row.prompt): row.prompt for row in own}
    numbers = {key: number for number, key in enumerate(prompts)}
    sent = {
        "prompts": [[prompt.uid, prompt.token_ids.tolist()] for prompt in prompts.values()],
        "rows": [[numbers[id(row.prompt)], row.sample_index, row.max_new_tokens, row.noise_step] for row in own],
    }
    by_host: list[Sequence[RolloutSequence]] = []
    for host, received in enumerate(gather_json_over_hosts(sent)):
        if host == jax.process_index():
            by_host.append(own)
            continue
        theirs = [Prompt(uid, np.asarray(ids, np.int32), "", None) for uid, ids in received["prompts"]]
        by_host.append([RolloutSequence(theirs[number], *others) for number, *others in received["rows"]])
    return [row for row in chain(*zip_longest(*by_host)) if row is not None]


def stop_length(token_ids: Sequence[int], stop: Sequence[str], stop_text: DecodeText) -> int | None:
    """Returns the number of tokens up to and including the one that completes a stop string; None if there is none.

    The devices do not see the text of tokens, so the host cuts finished samples, as in vLLM and TRL. This affects no
    earlier tokens or logprobs, and no other samples.

    Args:
        stop_text: converts token ids to text; further tokens must not change a stop string that the text contains.
    """

    def is_stopped(count: int) -> bool:
        text = stop_text(token_ids[:count])
        return any(string in text for string in stop)

    if not stop or not is_stopped(len(token_ids)):
        return None
    return bisect_left(range(len(token_ids)), True, key=is_stopped)
