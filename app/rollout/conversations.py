"""Multi-turn conversations: an environment answers each turn of a sample, and its observation is appended as tokens.

Sampled token ids are never re-encoded: the environment gets their text. Only observations are encoded, together with
the tokens by which the chat template separates turns.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from jaxtyping import Int32

from app.distributed.stop_check import StopCheck, StoppedError, never_stop
from app.environments.episode_pool import EpisodePool, EpisodeReply, EpisodeStart
from app.environments.interface import ToolCall
from app.plugins.values import Failure
from app.prompts.chat import to_messages
from app.prompts.observation_encoder import ObservationEncoder
from app.records.sample import DROPPED_PREFIX, Episode, Messages, Prompt, Turn
from app.rollout.request import GenerationRequest
from app.rollout.sequence import DecodeText, Opening, RolloutSequence, make_sequences
from settings.errors import InputError

log = logging.getLogger(__name__)

MAX_OBSERVATIONS = 1024
"""Maximum number of observations whose token ids are cached."""

ENVIRONMENT_DROPPED = f"{DROPPED_PREFIX}environment"
"""Prefix of the finish reason of a sample whose environment failed."""


@dataclass(frozen=True)
class TurnLimits:
    max_turns: int
    max_turn_tokens: int | None
    max_observation_tokens: int | None
    max_prompt_tokens: int
    """Maximum number of prompt tokens before the policy's first turn."""
    max_suspended: int | None
    """Maximum number of samples per engine that wait for environments; None = `SUSPENDED_PER_SLOT` for each slot."""


@dataclass
class Conversations:
    """Sends each finished turn to the environment of its sample, and appends the observation to the sample.

    Only one thread at a time may use it; the environments run in separate processes.
    """

    pool: EpisodePool
    observations: ObservationEncoder
    limits: TurnLimits
    seed: int
    """Seed of the run."""
    encode_opening: Callable[[Messages], list[int]]
    """Returns the token ids of a chat, up to the start of the policy's first turn."""
    system_prompt: str | None
    decode_text: DecodeText
    read_calls: Callable[[Sequence[int]], list[ToolCall]]
    """Returns the tool calls in the token ids of a turn."""
    _acting: dict[str, tuple[RolloutSequence, Turn | None]] = field(default_factory=dict)
    """Row key -> (row that waits for its environment, turn). The turn is None unless its observation did not fit; the
    row then waits only for the scores of its episode."""
    _encoded: dict[str, Int32[np.ndarray, "n"]] = field(default_factory=dict)
    """JSON of an observation's messages -> its token ids."""
    _failed: list[EpisodeReply] = field(default_factory=list)
    """Replies for rows whose environment failed to open the conversation."""
    _opened: dict[str, Opening] = field(default_factory=dict)
    """`_identity` of a prompt -> its opening."""

    def open(self, prompts: Sequence[Prompt], *, stop_requested: StopCheck = never_stop) -> list[Opening]:
        """Returns the opening that the environment gives each prompt; all samples of a prompt share it.

        If the environment fails, the prompt stays unchanged and its samples are dropped after one token.

        Raises:
            StoppedError: a stop was requested before all environments had answered.
        """
        keys = [_identity(prompt) for prompt in prompts]
        new = {key: prompt for key, prompt in zip(keys, prompts, strict=True) if key not in self._opened}
        starts = [self._start(key, prompt) for key, prompt in new.items()]
        results = self.pool.openings(starts, stop_requested=stop_requested)
        if results is None:
            raise StoppedError
        opened = dict(self._opened)
        for (key, prompt), start, result in zip(new.items(), starts, results, strict=True):
            opened[key] = self._opening(prompt, start, result)
        # Failures are not kept, because they may be temporary.
        self._opened = {key: one for key, one in opened.items() if one.failure is None}
        return [opened[key] for key in keys]

    def _opening(self, prompt: Prompt, start: EpisodeStart, result: Messages | Failure | None) -> Opening:
        if result is None or isinstance(result, Failure):
            return Opening(prompt, start, None, result)
        ids = self.encode_opening(to_messages(result, self.system_prompt))
        if len(ids) > self.limits.max_prompt_tokens:
            detail = (
                f"its opening has {len(ids)} tokens, more than data.max_prompt_length = "
                f"{self.limits.max_prompt_tokens}; raise that setting, or shorten what `reset` returns"
            )
            return Opening(prompt, start, None, Failure("opening", detail))
        return Opening(replace(prompt, source=result, token_ids=np.array(ids, np.int32)), start, result)

    def _start(self, key: str, prompt: Prompt) -> EpisodeStart:
        digest = hashlib.blake2b(f"{self.seed}/{key}".encode(), digest_size=4).digest()
        columns: dict[str, Any] = {**prompt.extra, "prompt": prompt.source, "answer": prompt.answer}
        return EpisodeStart(int.from_bytes(digest, "little"), columns)

    # Turns -------------------------------------------------------------------------------------------------------

    @property
    def num_acting(self) -> int:
        """Number of rows waiting for their environments."""
        return len(self._acting)

    def make_rows(
        self, prompts: Sequence[Prompt], request: GenerationRequest, *, noise_step: int, stop_requested: StopCheck
    ) -> list[RolloutSequence]:
        """Opens the prompts with their environments and returns new rows for them; see `open` and `make_sequences`."""
        openings = self.open(prompts, stop_requested=stop_requested)
        rows = make_sequences([opening.prompt for opening in openings], request, noise_step=noise_step)
        for number, row in enumerate(rows):
            row.opening, row.plays = openings[number // request.group_size], True
            row.max_turn_tokens = self.limits.max_turn_tokens
            if row.opening.failure is not None:
                row.max_new_tokens = 1
        return rows

    def send(self, row: RolloutSequence) -> None:
        """Sends the finished turn of a row to its environment without waiting for the answer."""
        assert row.opening is not None
        self._acting[row.key] = row, None
        _, start, messages, failure = row.opening
        if failure is not None:
            self._failed.append(EpisodeReply(row.key, failure=failure))
            self.pool.on_reply()
            return
        if row.turn_end == "length":
            self.pool.end(row.key, start, messages)
            return
        ids = row.token_ids[row.turn_start :].tolist()
        is_last = len(row.turns) + 1 >= self.limits.max_turns
        self.pool.step(row.key, start, messages, self.decode_text(ids), self.read_calls(ids), is_last=is_last)

    def take(self, *, timeout_s: float = 0.0) -> list[RolloutSequence]:
        """Returns the rows that environments have answered since the last call: each is done or has a new observation.

        Args:
            timeout_s: maximum wait for the first answer.
        """
        failed, self._failed = self._failed, []
        taken = [*failed, *self.pool.take(0.0 if failed else timeout_s)]
        replies = [(self._acting.pop(reply.key), reply) for reply in taken if reply.key in self._acting]
        for (row, cut), reply in replies:
            self._answer(row, cut, reply)
        return [row for (row, _), _ in replies if row.key not in self._acting]

    def _answer(self, row: RolloutSequence, cut: Turn | None, reply: EpisodeReply) -> None:
        """Ends a row or appends its observation; if the observation does not fit, requests the episode's scores.

        Args:
            cut: last turn of a row whose observation did not fit, so that `reply` has only scores; otherwise None.
        """
        turn = cut or replace(
            self._turn(row),
            messages=list(map(dict, reply.messages)),
            reward=reply.reward,
            seconds=reply.seconds,
            metrics=reply.metrics,
        )
        if reply.failure is not None:
            self._drop(row, turn, *reply.failure)
        elif cut is not None:
            self._end(row, turn, "observation", "length", reply)
        elif row.turn_end == "length":
            is_full = row.num_tokens == row.max_new_tokens
            self._end(row, turn, "tokens" if is_full else "turn_tokens", "length", reply)
        elif reply.terminated:
            self._end(row, turn, "terminated", "stop", reply)
        elif reply.truncated:
            self._end(row, turn, "truncated", "length", reply)
        elif len(row.turns) + 1 >= self.limits.max_turns:
            self._end(row, turn, "turns", "length", reply)
        else:
            self._observe(row, turn)

    def _turn(self, row: RolloutSequence) -> Turn:
        """Returns the current turn of a row, without the environment's answer."""
        text = self.decode_text(row.token_ids[row.turn_start :].tolist())
        return Turn(start=row.turn_start, end=row.num_tokens, text=text)

    def _observe(self, row: RolloutSequence, turn: Turn) -> None:
        messages = self.observations.fitted(turn.messages, self.limits.max_observation_tokens)
        turn = replace(turn, messages=messages)
        try:
            ids = self._encode(messages)
        except InputError as error:
            self.pool.abandon(row.key)
            self._drop(row, turn, "template", str(error))
            return
        if row.num_tokens + len(ids) < row.max_new_tokens:
            row.observe(turn, ids)
            return
        assert row.opening is not None
        self._acting[row.key] = row, turn
        self.pool.end(row.key, row.opening.start, row.opening.messages)

    def _encode(self, messages: Messages) -> Int32[np.ndarray, "n"]:
        """Returns an observation's token ids; cached, because encoding is slow and samples often share observations."""
        key = json.dumps(messages)
        if key not in self._encoded:
            if len(self._encoded) == MAX_OBSERVATIONS:
                self._encoded.clear()
            self._encoded[key] = np.array(self.observations.encode(messages), np.int32)
        return self._encoded[key]

    def _drop(self, row: RolloutSequence, turn: Turn, why: str, detail: str) -> None:
        log.warning("the environment of %s failed: %s", row.uid, detail)
        row.episode = Episode((*row.turns, turn), "dropped")
        row.finish(f"{ENVIRONMENT_DROPPED} {why}")

    def _end(self, row: RolloutSequence, turn: Turn, end: str, reason: str, reply: EpisodeReply) -> None:
        row.episode = Episode((*row.turns, turn), end, reply.scores)
        row.finish(reason)

    def abandon(self, rows: Iterable[RolloutSequence]) -> None:
        """Closes the environments of rows that end without an answer."""
        for row in rows:
            if row.plays and row.episode is None:
                self.pool.abandon(row.key)
                self._acting.pop(row.key, None)
                row.episode = Episode((*row.turns, self._turn(row)), "dropped")


def _identity(prompt: Prompt) -> str:
    """Returns a unique key of a prompt. Its uid is not unique: data files with the same name give the same uids."""
    return json.dumps([prompt.uid, prompt.source, prompt.answer, prompt.extra], default=str)
