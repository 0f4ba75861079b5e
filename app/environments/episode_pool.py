"""Episodes in worker processes: one thread starts, feeds, supervises, kills and replaces them.

A worker plays many episodes at once, and an episode stays in its worker. If a worker dies or one of its steps hangs, it
is killed, and its episodes are played again elsewhere. Those whose step was running are suspects, or all if none was,
because one step can stop all others of its process: they run while no other step does, and the next death or hang is
theirs. A step that hangs alone is not tried again.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from app.distributed.stop_check import STOP_CHECK_INTERVAL_S, StopCheck, never_stop
from app.environments.builtin import LOOKUP_VARIABLES
from app.environments.episode import Episode, EpisodeFailure, EpisodeReply, EpisodeStart, Request
from app.environments.interface import ToolCall
from app.plugins.loading import LoadError
from app.plugins.worker_process import (
    WorkerProcess,
    describe_exit,
    raise_if_refused,
    wait_for_answers,
    worker_environment,
)
from app.records.sample import Messages
from settings.errors import InputError

INVALID_ANSWER = "its process sent an invalid answer"


@dataclass(frozen=True, kw_only=True)
class EpisodeSetup:
    """What the episodes of a pool play and may use: the settings `env.*` of these names."""

    source: str | None
    tools: Sequence[str]
    workers: int
    concurrency: int
    step_timeout_s: float
    episode_timeout_s: float
    load_timeout_s: float
    memory_mib: int
    replayable: bool
    environment: Sequence[str]
    """Names of environment variables that workers get in addition to `ALLOWED_ENVIRONMENT`."""


class EpisodeWorker(WorkerProcess):
    """A worker that plays episodes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__("app.environments.worker_main", environment)
        self.episodes: dict[int, Episode] = {}
        self.is_trial = False
        """Whether `load` started it, before the run does any work."""
        self.running: list[Episode] = []
        """Those with a request that is not answered yet."""


class EpisodePool:
    """Plays episodes of an environment, tools, or both. Its creator must close it.

    All methods can be called from any thread. An environment's fault costs its own episode and becomes a reply with
    `failure`. If a worker cannot be started, all methods but `abandon`, `wake` and `close` raise InputError if `load`
    started it, else, after a second attempt, RuntimeError.
    """

    def __init__(self, setup: EpisodeSetup) -> None:
        self.on_reply: Callable[[], object] = lambda: None
        """Called in the pool's thread after each reply."""
        self._setup = setup
        # With many threads, the memory areas that glibc keeps for each core fill the address space.
        self._environment = worker_environment([*setup.environment, *LOOKUP_VARIABLES]) | {"MALLOC_ARENA_MAX": "2"}
        self._workers: list[EpisodeWorker] = []
        self._start_failed = False
        """Whether the last start of a worker failed."""
        self._episodes: dict[str, Episode] = {}
        """Those whose replies are wanted, by key."""
        self._is_closing = False
        self._commands: deque[Callable[[], object]] = deque()
        self._condition = threading.Condition()
        """Guards what follows: the pool's thread adds to it, callers take from it."""
        self._tools: list[dict[str, Any]] | None = None
        self._replies: list[EpisodeReply] = []
        self._is_woken = False
        self._error: BaseException | None = None
        """Why the thread has ended."""
        self._alarm, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def load(self) -> list[dict[str, Any]]:
        """Starts the first worker, and returns the tools of the environment, in the format of OpenAI.

        Raises:
            InputError: something cannot be imported, or is no environment or tool.
        """
        self._post(partial(self._start, is_trial=True))
        self._wait(lambda: self._tools is not None)
        return self._tools or []

    def openings(
        self, starts: Sequence[EpisodeStart], *, stop_requested: StopCheck = never_stop
    ) -> list[Messages | EpisodeFailure | None] | None:
        """Returns what the policy reads first in each episode: None = the prompt of its row.

        Returns None instead of the list if a stop is requested meanwhile.
        """
        requests = [Request("reset", vars(start), is_last=True) for start in starts]
        episodes = [Episode("opening", [], [request]) for request in requests]
        for episode in episodes:
            self._post(partial(self._place, episode))
        for episode in episodes:
            while not episode.replies:
                if stop_requested():
                    return None
                self._wait(partial(bool, episode.replies), STOP_CHECK_INTERVAL_S)
        replies = [episode.replies[0] for episode in episodes]
        return [EpisodeFailure(one.failure, one.detail) if one.failure else one.messages or None for one in replies]

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
        """Passes a turn of the policy to its episode, which is opened if the key is new. The reply comes by `take`.

        Args:
            opening: what `openings` returned for this start.
            is_last: whether the episode is over after this turn, even if the environment does not end it.
        """
        request = Request("step", {"text": text, "calls": list(calls)}, is_last=is_last)
        self._post(partial(self._ask, key, start, opening, request))

    def end(self, key: str, start: EpisodeStart, opening: Messages | None) -> None:
        """Ends an episode whose last turn was cut, so that the environment never reads it. The reply has the scores."""
        self._post(partial(self._ask, key, start, opening, Request("score", {}, is_last=True)))

    def abandon(self, key: str) -> None:
        """Closes an episode without scores and without a further reply."""
        if self._error is None:
            self._post(partial(self._abandon, key))

    def take(self, timeout_s: float | None) -> list[EpisodeReply]:
        """Returns all replies so far. If there are none, waits for one, at most `timeout_s` (None = without limit)."""
        self._wait(lambda: bool(self._replies) or self._is_woken, timeout_s)
        with self._condition:
            self._is_woken = False
            taken = self._replies.copy()
            # In place, because episodes add to this list.
            self._replies.clear()
            return taken

    def wake(self) -> None:
        """Ends the current or next wait of `take`."""
        with self._condition:
            self._is_woken = True
            self._condition.notify_all()

    def close(self) -> None:
        """Kills all workers and waits until they have exited."""
        self._is_closing = True
        self._alert()
        self._thread.join()
        os.close(self._alarm)
        os.close(self._ring)

    def _wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._error or is_ready(), timeout_s)
            if self._error is not None and not is_ready():
                raise self._error

    def _post(self, command: Callable[[], object]) -> None:
        if self._error is not None:
            raise self._error
        self._commands.append(command)
        self._alert()

    def _alert(self) -> None:
        with suppress(BlockingIOError):  # it is full, so the thread wakes anyway
            os.write(self._ring, b"x")

    # What follows runs in the pool's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                timeout_s = self._next_deadline() - time.monotonic()
                for worker, answers in wait_for_answers(self._workers, timeout_s=timeout_s, alarm=self._alarm):
                    self._receive(worker, answers)
                while self._commands:
                    self._commands.popleft()()
                for worker in tuple(self._workers):
                    self._end_if_overdue(worker)
                for worker in self._workers:
                    self._dispatch(worker)
            self._error = RuntimeError("the environments have been closed")
        except BaseException as error:  # whoever waits must hear of it
            self._error = error
        finally:
            self._notify()
            for worker in self._workers:
                worker.kill()

    def _next_deadline(self) -> float:
        limit_s = self._setup.step_timeout_s
        steps = (episode.sent_at + limit_s for worker in self._workers for episode in worker.running)
        return min([math.inf, *steps, *(worker.deadline for worker in self._workers)])

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()
        self.on_reply()

    def _start(self, *, is_trial: bool = False) -> None:
        worker = EpisodeWorker(self._environment)
        worker.is_trial, worker.is_retry = is_trial, self._start_failed
        self._workers.append(worker)
        order = {"source": self._setup.source, "tools": self._setup.tools, "memory_mib": self._setup.memory_mib}
        worker.send(order, timeout_s=self._setup.load_timeout_s)

    def _place(self, episode: Episode) -> None:
        """Gives an episode to the worker with the fewest."""
        if len(self._workers) < self._setup.workers and all(worker.episodes for worker in self._workers):
            self._start()
        worker = min(self._workers, key=lambda worker: len(worker.episodes))
        worker.episodes[episode.number] = episode

    def _ask(self, key: str, start: EpisodeStart, opening: Messages | None, request: Request) -> None:
        if key not in self._episodes:
            reset = Request("reset", vars(start), reply=EpisodeReply(key, opening or []))
            self._episodes[key] = Episode(key, self._replies, [reset])
            self._place(self._episodes[key])
        episode = self._episodes[key]
        if episode.failure is not None:
            self._emit(episode, episode.failure, is_over=True)
        else:
            episode.requests.append(request)

    def _abandon(self, key: str) -> None:
        if episode := self._episodes.pop(key, None):
            episode.leave()

    def _dispatch(self, worker: EpisodeWorker) -> None:
        """Sends requests to a worker, as many as it may run at once; a suspect runs alone."""
        running = worker.running
        if not worker.is_loaded or len(running) == self._setup.concurrency:
            return
        ready = [one for one in worker.episodes.values() if one.num_sent < len(one.requests) and not one.current]
        for episode in sorted(ready, key=lambda episode: not episode.is_suspect):
            is_alone = any(one.is_suspect for one in (episode, *running))
            if len(running) >= (1 if is_alone else self._setup.concurrency):
                return
            request = episode.current = episode.requests[episode.num_sent]
            episode.num_sent += 1
            episode.sent_at = time.monotonic()
            running.append(episode)
            order = {"key": episode.number, "do": request.do, "is_last": request.is_last}
            worker.send({**order, **request.fields})

    def _receive(self, worker: EpisodeWorker, answers: list[dict[str, Any]] | None) -> None:
        if answers is None:
            self._lose(worker, "exit")
        for answer in answers or ():
            if worker not in self._workers:  # lost at an earlier answer
                return
            finish = self._finish if worker.is_loaded else self._finish_load
            finish(worker, answer)

    def _finish_load(self, worker: EpisodeWorker, answer: Mapping[str, Any]) -> None:
        try:
            raise_if_refused(answer, memory=f"env.memory_mib = {self._setup.memory_mib}")
        except LoadError as refusal:
            self._lose(worker, "refused", str(refusal))
            return
        if "tools" not in answer:  # the plug-in wrote to our pipe
            self._lose(worker, "exit", INVALID_ANSWER)
            return
        worker.is_loaded = True
        worker.deadline = math.inf
        self._start_failed = False
        if self._tools is None:
            self._tools = answer["tools"]
            self._notify()

    def _finish(self, worker: EpisodeWorker, answer: Mapping[str, Any]) -> None:
        """Handles the answer to a request."""
        try:
            [episode] = [one for one in worker.running if one.number == answer["key"]]
            reply = episode.read(answer)
        except (KeyError, ValueError):  # the plug-in wrote to our pipe
            self._lose(worker, "exit", INVALID_ANSWER)
            return
        if reply.failure == "memory":  # it may stay allocated
            self._lose(worker, reply.failure, reply.detail)
            return
        request, episode.current = episode.current, None
        worker.running.remove(episode)
        assert request is not None
        is_over = request.is_last or reply.terminated or reply.truncated or reply.failure is not None
        if is_over:
            del worker.episodes[episode.number]
        if not episode.is_wanted:
            return
        seconds = time.monotonic() - episode.sent_at
        episode.seconds += seconds if request.reply is None else 0.0
        known, limit_s = request.reply, self._setup.episode_timeout_s
        if reply.failure is not None:
            self._fail(episode, reply.failure, f"{request.do}: {reply.detail}")
        elif known is not None and known._replace(metrics=reply.metrics) != reply:
            kind = "opening" if request.do == "reset" else "replay"
            self._fail(episode, kind, f"{request.do}: gave another answer for the same seed, row and turns")
        elif episode.seconds > limit_s and not is_over:
            self._fail(episode, "timeout", f"its steps took more than {limit_s:g} s together")
        elif known is None:
            request.reply = reply
            episode.is_suspect = False
            self._emit(episode, reply._replace(seconds=seconds), is_over=is_over)

    def _fail(self, episode: Episode, kind: str, detail: str) -> None:
        """Tells whoever waits for an episode that it is lost, or whoever asks for it next."""
        episode.failure = EpisodeReply(episode.key, failure=kind, detail=detail)
        if any(request.reply is None for request in episode.requests):
            self._emit(episode, episode.failure, is_over=True)
        episode.leave()

    def _emit(self, episode: Episode, reply: EpisodeReply, *, is_over: bool) -> None:
        if is_over:
            self._episodes.pop(episode.key, None)
        episode.replies.append(reply)
        self._notify()

    def _end_if_overdue(self, worker: EpisodeWorker) -> None:
        now, setup = time.monotonic(), self._setup
        if any(episode.sent_at + setup.step_timeout_s <= now for episode in worker.running):
            self._lose(worker, "timeout", f"took more than {setup.step_timeout_s:g} s")
        elif worker.deadline <= now:
            self._lose(worker, "timeout", f"took more than {setup.load_timeout_s:g} s")

    def _lose(self, worker: EpisodeWorker, kind: str, detail: str = "") -> None:
        """Kills a worker and recovers its episodes.

        Raises:
            InputError: it was started by `load`, and cannot start.
            RuntimeError: it cannot start, and neither could one before.
        """
        status = worker.kill()
        self._workers.remove(worker)
        detail = detail or describe_exit(status)
        if not worker.is_loaded:
            why = detail if kind == "refused" else f"during the import, it {detail.removeprefix('its process ')}"
            played = {"env.source": self._setup.source, "env.tools": ", ".join(self._setup.tools)}
            name = " and ".join(f"{setting}: {value}" for setting, value in played.items() if value)
            if worker.is_trial:
                raise InputError(f"{name}: {why}")
            if worker.is_retry:
                way_out = "mend that and start the command again, grpo train with --resume auto"
                raise RuntimeError(f"{name}: two attempts to start a process have failed: {why}; {way_out}")
            self._start_failed = True
        is_certain = kind == "timeout" and len(worker.running) == 1
        for episode in worker.episodes.values():
            if not episode.is_wanted:  # it was about to close
                continue
            request = episode.current
            may_be_guilty = worker.is_loaded and (request is not None or not worker.running)
            is_guilty = may_be_guilty and (is_certain or episode.is_suspect)
            is_lost = episode.num_sent > 0 and not self._setup.replayable
            episode.is_suspect |= may_be_guilty
            if is_guilty or is_lost:
                self._fail(episode, kind, f"{request.do}: {detail}" if request else detail)
            else:
                episode.num_sent, episode.current = 0, None
                self._place(episode)
