"""Episodes of an environment, tools, or both, in the workers of a pool."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from app.distributed.stop_check import STOP_CHECK_INTERVAL_S, StopCheck, never_stop
from app.environments.interface import ToolCall
from app.plugins.pool import Job, Limits, Pool, Request
from app.plugins.values import Failure
from app.plugins.worker_process import worker_environment
from app.records.sample import Messages
from settings.schema.reward import EnvironmentSettings, PluginSettings
from settings.secrets import redact

EPISODE_TIMEOUT_S = 3600.0
"""Time limit for all environment steps of an episode together."""


@dataclass(frozen=True)
class EpisodeStart:
    """The arguments of an environment's `reset`; they are equal for all samples of a prompt."""

    seed: int
    columns: Mapping[str, Any]
    """Columns of the data set's row, with `prompt` and `answer`."""


class EpisodeReply(NamedTuple):
    """An environment's reply to a turn, and its scores if the episode is over."""

    key: str
    messages: Messages = []  # noqa: RUF012  (never changed)
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    metrics: Mapping[str, float] = {}
    scores: Mapping[str, float] = {}
    """Rewards for the whole episode, with their names; only in the last reply."""
    seconds: float = 0.0
    """Time spent in the environment, without waiting for a free worker and without replays."""
    failure: Failure | None = None
    """Failure of the environment, which ends the episode."""
    is_over: bool = False


REPLY = TypeAdapter(EpisodeReply)


class EpisodeJob(Job):
    """The requests of an episode. If its process dies, the answered requests are sent again to another process."""

    shares_worker = True

    def __init__(self, key: str, reset: Request, *, timeout_s: float, emit: Callable[[EpisodeReply], object]) -> None:
        super().__init__(reset)
        self.key = key
        """The sampler's name for this episode."""
        self.timeout_s = timeout_s
        self.emit = emit
        self.failure: EpisodeReply | None = None
        """The reply to later requests once the episode has failed."""
        self.seconds = 0.0
        """Time that all steps so far took."""

    def read(self, answer: Mapping[str, Any]) -> EpisodeReply:
        reply = REPLY.validate_python({**answer, "key": self.key})
        messages = [{key: redact(text) for key, text in message.items()} for message in reply.messages]
        return reply._replace(messages=messages)

    def accept(self, request: Request, reply: EpisodeReply, *, seconds: float) -> Failure | None:
        known: EpisodeReply | None = request.reply
        if known is not None and known._replace(metrics=reply.metrics) != reply:
            kind = "opening" if request.fields["do"] == "reset" else "replay"
            return Failure(kind, "answered differently for the same seed, row and turns")
        if known is not None:
            return None
        self.seconds += seconds
        if self.seconds > self.timeout_s and not reply.is_over:
            return Failure("timeout", f"its steps took more than {self.timeout_s:g} s together")
        request.reply = reply
        self.emit(reply._replace(seconds=seconds))
        return None

    def fail(self, failure: Failure, request: Request | None) -> None:
        """Reports the failure to the pending request, or else to the next one."""
        text = f"{request.fields['do']}: {failure.text}" if request else failure.text
        self.failure = EpisodeReply(self.key, failure=Failure(failure.kind, text), is_over=True)
        if any(request.reply is None for request in self.requests):
            self.emit(self.failure)


class EpisodePool(Pool):
    """Runs episodes. A failure affects only its own episode and becomes a reply with `failure`.

    Args:
        episode_timeout_s: time limit for all steps of an episode together.
    """

    def __init__(
        self, env: EnvironmentSettings, plugins: PluginSettings, *, episode_timeout_s: float = EPISODE_TIMEOUT_S
    ) -> None:
        played = {"env.source": env.source, "env.tools": ", ".join(env.tools)}
        self.on_reply: Callable[[], object] = lambda: None
        """Called in the pool's thread after each reply."""
        self._new_episode = partial(EpisodeJob, timeout_s=episode_timeout_s)
        self._episodes: dict[str, EpisodeJob] = {}
        """Maps keys to the episodes that are neither over nor abandoned. Only the pool's thread uses it."""
        self._replies: list[EpisodeReply] = []
        self._is_woken = False
        super().__init__(
            "app.environments.worker_main",
            {"source": env.source, "tools": env.tools},
            name=" and ".join(f"{setting}: {value}" for setting, value in played.items() if value),
            limits=Limits(
                workers=plugins.workers,
                concurrency=env.concurrency,
                timeout_s=env.step_timeout_s,
                memory_mib=plugins.memory_mib,
            ),
            # With many threads, glibc's memory arenas per core would fill the address space.
            environment=worker_environment(plugins.env_vars) | {"MALLOC_ARENA_MAX": "2"},
        )

    def openings(
        self, starts: Sequence[EpisodeStart], *, stop_requested: StopCheck = never_stop
    ) -> list[Messages | Failure | None] | None:
        """Returns each episode's opening messages or failure; None for an episode that opens with its row's prompt.

        Returns None instead of the list if a stop is requested in the meantime.
        """
        replies: list[EpisodeReply] = []
        for number, start in enumerate(starts):
            reset = Request({"do": "reset", **vars(start)}, is_last=True)
            self.post(partial(self.add, self._new_episode(str(number), reset, emit=replies.append)))
        while len(replies) < len(starts):
            if stop_requested():
                return None
            self.wait(lambda: len(replies) == len(starts), STOP_CHECK_INTERVAL_S)
        replies.sort(key=lambda reply: int(reply.key))
        return [reply.failure or reply.messages or None for reply in replies]

    def step(
        self,
        key: str,
        start: EpisodeStart,
        opening: Messages | None,
        text: str,
        calls: Sequence[ToolCall],
        *,
        is_last: bool,
    ) -> None:
        """Sends a turn to its episode, which starts if the key is new. `take` returns the reply.

        Args:
            opening: the result of `openings` for this start.
            is_last: whether the episode is over after this turn, even if the environment does not end it.
        """
        request = Request({"do": "step", "text": text, "calls": list(calls)}, is_last=is_last)
        self.post(partial(self._ask, key, start, opening, request))

    def end(self, key: str, start: EpisodeStart, opening: Messages | None) -> None:
        """Ends an episode without sending its last, truncated turn. The reply has the scores."""
        self.post(partial(self._ask, key, start, opening, Request({"do": "score"}, is_last=True)))

    def abandon(self, key: str) -> None:
        """Closes an episode without scores and without a further reply."""
        if self.is_open:
            self.post(partial(self._abandon, key))

    def take(self, timeout_s: float | None) -> list[EpisodeReply]:
        """Returns all replies so far. If there are none, waits for one, at most `timeout_s` (None = no limit)."""
        self.wait(lambda: bool(self._replies) or self._is_woken, timeout_s)
        with self.changed:
            self._is_woken = False
            taken, self._replies = self._replies, []
            return taken

    def wake(self) -> None:
        """Ends the current or next wait of `take`."""
        with self.changed:
            self._is_woken = True
            self.changed.notify_all()

    # The methods below run in the pool's thread.

    def notify(self) -> None:
        super().notify()
        self.on_reply()

    def _ask(self, key: str, start: EpisodeStart, opening: Messages | None, request: Request) -> None:
        if key not in self._episodes:
            reset = Request({"do": "reset", **vars(start)}, reply=EpisodeReply(key, opening or []))
            self._episodes[key] = self._new_episode(key, reset, emit=self._emit)
            self.add(self._episodes[key])
        episode = self._episodes[key]
        if episode.failure is not None:
            self._emit(episode.failure)
            self.notify()
        else:
            episode.requests.append(request)

    def _abandon(self, key: str) -> None:
        if episode := self._episodes.pop(key, None):
            episode.leave()

    def _emit(self, reply: EpisodeReply) -> None:
        if reply.is_over:
            self._episodes.pop(reply.key, None)
        with self.changed:
            self._replies.append(reply)
