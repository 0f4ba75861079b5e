"""Episodes in worker processes: one thread starts, feeds, supervises, kills and replaces them.

A worker plays many episodes at once, and an episode stays in its worker. If a worker dies or one of its steps hangs, it
is killed, and its other episodes are played again elsewhere. Those whose step was running when it died are suspects:
they run while no other step does, and the next death is theirs.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from app.environments.builtin import LOOKUP_VARIABLES
from app.environments.episode import Episode, EpisodeFailure, EpisodeReply, EpisodeStart, Request
from app.environments.interface import Answer, ToolCall
from app.plugins.loading import LoadError
from app.plugins.worker_process import (
    WorkerProcess,
    describe_exit,
    lend_variables,
    raise_if_refused,
    wait_for_answers,
    worker_environment,
)
from app.records.sample import Messages
from settings.schema.environment import EnvironmentSettings

WORKER_PROGRAM = "app.environments.worker_main"

MAX_LOSSES = 4
"""How often an episode may be in a process that dies while no step runs, so that nobody is a suspect."""


class EnvironmentDescription(NamedTuple):
    """What the sampler must know of an environment."""

    tool_schemas: list[dict[str, Any]]
    """Its tools, in the format of OpenAI."""


class EpisodeWorker(WorkerProcess):
    """A worker that plays episodes."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        super().__init__(WORKER_PROGRAM, environment)
        self.episodes: list[Episode] = []
        self.waiting: deque[Episode] = deque()
        """Those with a request that is not sent yet."""
        self.running: dict[int, Episode] = {}
        """Those with a request that is not answered yet, by number."""


class EpisodePool:
    """Plays episodes of an environment, tools, or both. Its creator must close it.

    All methods can be called from any thread. An environment's fault costs its own episode and becomes a reply with
    `failure`; only if no worker can be started anymore, the methods raise LoadError.

    Raises:
        InputError: an environment variable of `env.environment` is not set.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        lend_variables(settings.environment, setting="env.environment")
        self.on_reply: Callable[[], object] = lambda: None
        """Called in the pool's thread after each reply."""
        self._settings = settings
        # With many threads, the memory areas that glibc keeps for each core fill the address space.
        self._environment = worker_environment([*settings.environment, *LOOKUP_VARIABLES]) | {"MALLOC_ARENA_MAX": "2"}
        self._numbers = itertools.count()
        self._workers: list[EpisodeWorker] = []
        self._start_failed = False
        """Whether the last start of a worker failed."""
        self._episodes: dict[str, Episode] = {}
        self._failures: dict[str, EpisodeFailure] = {}
        """Of episodes from which nothing was asked when they failed."""
        self._is_closing = False
        self._commands: deque[Callable[[], object]] = deque()
        self._condition = threading.Condition()
        """Guards what follows, which both sides use."""
        self._description: EnvironmentDescription | None = None
        self._opened: dict[str, Messages | EpisodeFailure | None] = {}
        self._replies: list[EpisodeReply] = []
        self._error: BaseException | None = None
        self._alarm, self._ring = os.pipe()
        self._thread = threading.Thread(target=self._run, name="episodes", daemon=True)
        self._thread.start()

    def load(self) -> EnvironmentDescription:
        """Starts the first worker, and returns the description of the environment.

        Raises:
            LoadError: something cannot be imported, or is no environment or tool.
        """
        self._post(self._start)
        self._wait(lambda: self._description is not None)
        assert self._description is not None
        return self._description

    def openings(self, starts: Sequence[EpisodeStart]) -> list[Messages | EpisodeFailure | None]:
        """Returns what the policy reads first in each episode; None = the prompt of its row."""
        keys = [f"opening {next(self._numbers)}" for _ in starts]
        for key, start in zip(keys, starts, strict=True):
            self._post(partial(self._open, key, start))
        self._wait(lambda: all(key in self._opened for key in keys))
        return [self._opened.pop(key) for key in keys]

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
        self._post(partial(self._ask, key, start, opening, Request("score", {})))

    def abandon(self, key: str) -> None:
        """Closes an episode without scores and without a further reply."""
        self._post(partial(self._abandon, key))

    def take(self, timeout_s: float | None) -> list[EpisodeReply]:
        """Returns all replies so far. If there are none, waits for one, at most `timeout_s` (None = without limit)."""
        self._wait(lambda: bool(self._replies), timeout_s)
        with self._condition:
            replies, self._replies = self._replies, []
        return replies

    def close(self) -> None:
        """Kills all workers and waits until they have exited."""
        self._is_closing = True
        os.write(self._ring, b"x")
        self._thread.join()
        os.close(self._alarm)
        os.close(self._ring)

    def _wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> None:
        with self._condition:
            self._condition.wait_for(lambda: self._error or is_ready(), timeout_s)
            if self._error is not None and not is_ready():
                raise self._error

    def _post(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
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
        except BaseException as error:  # whoever waits must hear of it
            self._error = error
            self._notify()
        finally:
            for worker in self._workers:
                worker.kill()

    def _next_deadline(self) -> float:
        episodes = (episode.deadline for worker in self._workers for episode in worker.running.values())
        return min([math.inf, *episodes, *(worker.deadline for worker in self._workers)])

    def _notify(self) -> None:
        with self._condition:
            self._condition.notify_all()
        self.on_reply()

    def _start(self) -> EpisodeWorker:
        worker = EpisodeWorker(self._environment)
        self._workers.append(worker)
        settings = self._settings
        order = {"source": settings.source, "tools": settings.tools, "memory_mib": settings.memory_mib}
        worker.send(order, timeout_s=settings.load_timeout_s)
        return worker

    def _open(self, key: str, start: EpisodeStart, **opening: Messages | None) -> Episode:
        episode = self._episodes[key] = Episode(next(self._numbers), key, start, **opening)
        self._place(episode)
        return episode

    def _place(self, episode: Episode) -> None:
        """Gives an episode to the worker with the fewest."""
        if len(self._workers) < self._settings.workers and all(worker.episodes for worker in self._workers):
            self._start()
        worker = min(self._workers, key=lambda worker: len(worker.episodes))
        worker.episodes.append(episode)
        worker.waiting.append(episode)

    def _wake(self, episode: Episode) -> None:
        next(worker for worker in self._workers if episode in worker.episodes).waiting.append(episode)

    def _ask(self, key: str, start: EpisodeStart, opening: Messages | None, request: Request) -> None:
        if failure := self._failures.pop(key, None):
            self._emit(EpisodeReply(key, failure=failure.kind, detail=failure.detail))
            return
        episode = self._episodes.get(key) or self._open(key, start, messages=opening)
        is_idle = episode.is_idle
        episode.reply = EpisodeReply(key)
        episode.todo.append(request)
        if is_idle:
            self._wake(episode)

    def _abandon(self, key: str) -> None:
        self._failures.pop(key, None)
        episode = self._episodes.pop(key, None)
        if episode is not None:
            is_idle = episode.is_idle
            episode.leave()
            if is_idle:
                self._wake(episode)

    def _dispatch(self, worker: EpisodeWorker) -> None:
        """Sends requests to a worker, as many as it may run at once; a suspect runs alone."""
        while worker.is_loaded and worker.waiting and len(worker.running) < self._settings.concurrency:
            episode = worker.waiting[0]
            if worker.running and any(one.is_suspect for one in (episode, *worker.running.values())):
                return
            worker.waiting.popleft()
            worker.running[episode.number] = episode
            request = episode.current = episode.todo.popleft()
            episode.sent_at = time.monotonic()
            episode.deadline = episode.sent_at + self._settings.step_timeout_s
            worker.send({"episode": episode.number, "do": request.do, **request.fields})

    def _receive(self, worker: EpisodeWorker, answers: list[dict[str, Any]] | None) -> None:
        if answers is None:
            self._lose(worker, "exit")
        for answer in answers or ():
            if worker not in self._workers:  # lost at an earlier answer
                return
            if worker.is_loaded:
                self._finish(worker, answer)
            else:
                self._finish_load(worker, answer)

    def _finish_load(self, worker: EpisodeWorker, answer: Mapping[str, Any]) -> None:
        try:
            raise_if_refused(answer, memory=f"env.memory_mib = {self._settings.memory_mib}")
        except LoadError as refusal:
            self._lose(worker, "refused", str(refusal))
            return
        worker.is_loaded = True
        worker.deadline = math.inf
        self._start_failed = False
        if self._description is None:
            self._description = EnvironmentDescription(answer["tools"])
            self._notify()

    def _finish(self, worker: EpisodeWorker, answer: Mapping[str, Any]) -> None:
        """Handles the answer to a request."""
        try:
            episode = worker.running[answer["episode"]]
            request = episode.current
            assert request is not None
            read = request.read(answer)
        except (KeyError, TypeError, ValueError, AttributeError):  # the plug-in wrote to our pipe
            self._lose(worker, "exit", "its process sent an invalid answer")
            return
        if isinstance(read, EpisodeFailure) and read.kind == "memory":  # it may stay allocated
            self._lose(worker, *read)
            return
        if request.do == "close":
            worker.episodes.remove(episode)
        if isinstance(read, EpisodeFailure):
            failure = EpisodeFailure(read.kind, f"{request.do}: {read.detail}")
            if episode.is_wanted:
                self._fail(episode, failure)
            elif request.do == "close":
                print(f"env: {failure.detail}", file=sys.stderr)
        elif episode.is_wanted:
            is_new = request.answer is None
            if is_new:
                self._finish_request(episode, request, read, time.monotonic() - episode.sent_at)
                request.answer = read
            episode.played.append(request)
            episode.is_suspect = episode.is_suspect and not is_new and bool(episode.todo)
        del worker.running[episode.number]
        episode.current = None
        if episode.todo:
            worker.waiting.append(episode)

    def _finish_request(self, episode: Episode, request: Request, fields: dict[str, Any], seconds: float) -> None:
        """Handles the first answer to a request."""
        if request.do == "reset":
            self._opened[episode.key] = fields["messages"]
            self._leave(episode)
            self._notify()
        elif request.do == "score":
            self._emit(episode.reply._replace(scores=fields["scores"], seconds=episode.reply.seconds + seconds))
            self._leave(episode)
        else:
            episode.seconds += seconds
            episode.reply = EpisodeReply(episode.key, **fields, seconds=seconds)
            if request.is_last or fields["terminated"] or fields["truncated"]:
                episode.todo.append(Request("score", {}))
            elif episode.seconds > self._settings.episode_timeout_s:
                text = f"its steps took more than {self._settings.episode_timeout_s:g} s together"
                self._fail(episode, EpisodeFailure("timeout", text))
            else:
                self._emit(episode.reply)

    def _leave(self, episode: Episode) -> None:
        del self._episodes[episode.key]
        episode.leave()

    def _fail(self, episode: Episode, failure: EpisodeFailure) -> None:
        """Tells whoever waits for an episode that it is lost, or whoever asks for it next."""
        if episode.asks_opening:
            self._opened[episode.key] = failure
            self._notify()
        elif episode.is_awaited:
            self._emit(EpisodeReply(episode.key, failure=failure.kind, detail=failure.detail))
        else:
            self._failures[episode.key] = failure
        self._leave(episode)

    def _emit(self, reply: EpisodeReply) -> None:
        with self._condition:
            self._replies.append(reply)
        self._notify()

    def _end_if_overdue(self, worker: EpisodeWorker) -> None:
        now, settings = time.monotonic(), self._settings
        hung = [episode for episode in worker.running.values() if episode.deadline <= now]
        if hung:
            self._lose(worker, "timeout", f"took more than {settings.step_timeout_s:g} s", hung)
        elif worker.deadline <= now:
            self._lose(worker, "timeout", f"took more than {settings.load_timeout_s:g} s")

    def _lose(self, worker: EpisodeWorker, kind: str, detail: str = "", hung: Sequence[Episode] = ()) -> None:
        """Kills a worker and recovers its episodes.

        Raises:
            LoadError: a start has failed, of the first worker or twice in succession.
        """
        status = worker.kill()
        self._workers.remove(worker)
        detail = detail or describe_exit(status)
        if not worker.is_loaded:
            if self._description is None or self._start_failed:
                text = f"during the import, it {detail.removeprefix('its process ')}"
                raise LoadError(detail if kind == "refused" else text)
            self._start_failed = True
        for episode in worker.episodes:
            if episode.is_wanted:  # else it was about to close
                is_guilty = episode in hung if hung else bool(episode.current and episode.is_suspect)
                episode.is_suspect |= episode.current is not None and not hung
                episode.num_losses += not worker.running
                self._recover(episode, EpisodeFailure(kind, detail), is_guilty=is_guilty)

    def _recover(self, episode: Episode, failure: EpisodeFailure, *, is_guilty: bool) -> None:
        """Plays an episode again in another worker, if it may be."""
        request, episode.current = episode.current, None
        is_lost = bool(request or episode.played) and not self._settings.replayable
        if request:
            failure = EpisodeFailure(failure.kind, f"{request.do}: {failure.detail}")
            is_step = request.do == "step" and request.answer is None
            if is_guilty and is_step and failure.kind == "timeout" and self._settings.on_timeout == "tell":
                self._finish_request(episode, request, self._no_answer(request), self._settings.step_timeout_s)
                is_guilty = False
            else:
                episode.todo.appendleft(request)
        if not episode.is_wanted:
            return
        if is_lost or is_guilty or episode.num_losses > MAX_LOSSES:
            self._fail(episode, failure)
        else:
            episode.rewind()
            self._place(episode)

    def _no_answer(self, request: Request) -> dict[str, Any]:
        """Returns what the policy is told in place of the answer of a step that hangs."""
        text = f"No answer came within {self._settings.step_timeout_s:g} s."
        calls = request.fields["calls"]
        messages = [{"role": "tool", "content": text} for _ in calls] or [{"role": "user", "content": text}]
        return Answer(messages, metrics={"timeouts": 1.0})._asdict()
