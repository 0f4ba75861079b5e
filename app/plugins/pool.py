"""Worker processes that run plug-ins: one thread starts, feeds, supervises, kills and replaces them.

A worker serves jobs: calls of a reward function, one at a time, or many episodes of an environment at once. If a worker
dies or a request hangs, the worker is replaced, and its jobs are replayed in other workers. One request can block all
others of its process, so every job with a running request (or all jobs, if none was running) becomes a suspect. A
suspect's requests run alone in their process, so that a further death or hang is certainly the suspect's fault. A
request that hangs while running alone is not retried.

A worker leads its own process group, so that its child processes are killed with it. It inherits few environment
variables and no open files, and exits when this process does.
"""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from app.plugins.values import Failure, one_line
from app.plugins.worker_process import WorkerProcess, describe_exit, wait_for_answers
from settings.errors import InputError
from settings.secrets import redact

LOAD_TIMEOUT_S = 60.0
"""Time limit for importing a plug-in: libraries may load slowly from a cold disk."""
INVALID_ANSWER = Failure("exit", "its process sent an invalid answer")
OUT_OF_MEMORY_SIGNS = ("MemoryError", "allocate memory", "failed to map segment")


class WorkersLostError(RuntimeError):
    """A pool has no workers, because two attempts to start one have failed or the pool has been closed."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the number, concurrency, time and memory of a pool's workers."""

    workers: int
    concurrency: int = 1
    """Maximum number of requests that a worker serves concurrently."""
    timeout_s: float
    """Wall-clock time limit of a request."""
    memory_mib: int
    load_timeout_s: float = LOAD_TIMEOUT_S


@dataclass(eq=False)
class Request:
    """A request of a job, and its reply, which is None until the worker has answered."""

    fields: Mapping[str, Any]
    is_last: bool = False
    """Whether the reply ends the job."""
    reply: Any = None


class Job(ABC):
    """Requests that one worker answers in order. If that worker dies, all of them are sent again to another one."""

    shares_worker: ClassVar[bool]
    """Whether the job's worker may serve other jobs at the same time. If not, only an idle worker takes the job; if it
    is a suspect, only a worker that has not answered any request."""
    numbers = itertools.count()

    def __init__(self, *requests: Request) -> None:
        self.number = next(self.numbers)
        """The job's id in messages to the worker."""
        self.requests = [*requests]
        """All requests of the job; the first `num_sent` have been sent to its current worker."""
        self.num_sent = 0
        self.current: Request | None = None
        """The request that the worker is serving now; None between requests."""
        self.sent_at = 0.0
        self.is_wanted = True
        """Whether a caller still needs the replies; if not, the job is only closed."""
        self.is_suspect = False
        """Whether this job may have killed or blocked its process."""

    @abstractmethod
    def read(self, answer: Mapping[str, Any]) -> Any:
        """Validates a worker's answer and converts it to a reply. A plug-in could have written to the same pipe.

        Raises:
            ValueError, KeyError, TypeError, AttributeError, OverflowError: the answer is not valid.
        """

    @abstractmethod
    def accept(self, request: Request, reply: Any, *, seconds: float) -> Failure | None:
        """Stores the reply to a request or, in a replay, compares it with the earlier reply.

        Args:
            seconds: time that the worker took.

        Returns:
            The reason why the job fails despite the reply; None if it continues.
        """

    @abstractmethod
    def fail(self, failure: Failure, request: Request | None) -> None:
        """Records that the job has failed. `request` is the failed request, or None if it is unknown."""

    def leave(self) -> None:
        """Abandons the job: replaces the unsent requests with one that closes it."""
        self.is_wanted = False
        self.requests[self.num_sent :] = [Request({"do": "close"}, is_last=True)]


class Worker(WorkerProcess):
    """A worker process and the jobs assigned to it."""

    def __init__(self, program: str, environment: Mapping[str, str], *, is_retry: bool) -> None:
        super().__init__(program, environment)
        self.is_retry = is_retry
        """Whether this worker was started because the start of another one failed."""
        self.is_loaded = False
        self.load_deadline = math.inf
        self.num_answers = 0
        self.jobs: dict[int, Job] = {}
        self.running: dict[int, Job] = {}
        """The jobs that wait for an answer."""

    def deadline(self, limits: Limits) -> float:
        """Returns the `time.monotonic()` at which loading, or the worker's oldest running request, times out."""
        return min([self.load_deadline, *(job.sent_at + limits.timeout_s for job in self.running.values())])


class Pool:
    """Runs jobs of one plug-in. Its creator must close it.

    Methods can be called from any thread. If a worker cannot be started, `load` raises InputError, and other methods
    raise WorkersLostError after a second attempt.

    Args:
        program: module whose `main` a worker runs.
        order: first message to every worker, which says what to load.
        name: the plug-in in messages, such as `env.source: games.py:Story`.
        environment: all environment variables of the workers.
    """

    def __init__(
        self, program: str, order: Mapping[str, Any], *, name: str, limits: Limits, environment: Mapping[str, str]
    ) -> None:
        self.limits = limits
        self._program = program
        self._order = {**order, "memory_mib": limits.memory_mib}
        self._name = name
        self._environment = environment
        self._workers: list[Worker] = []
        self._start_failed = False
        self._suspects: deque[Job] = deque()
        self._waiting: deque[Job] = deque()
        """Jobs that wait for a worker, apart from suspects."""
        self._is_closing = False
        self._commands: deque[Callable[[], object]] = deque()
        self.changed = threading.Condition()
        """Notified after each change that a caller may wait for."""
        self._is_trial = False
        """Whether `load` starts the first worker, so that a failure to load is an InputError."""
        self._loaded: dict[str, Any] | None = None
        self._error: BaseException | None = None
        """The error with which the thread ended; None while it runs."""
        self._alarm, self._ring = os.pipe()
        os.set_blocking(self._ring, False)
        self._thread = threading.Thread(target=self._run, name="plug-ins", daemon=True)
        self._thread.start()

    def load(self) -> dict[str, Any]:
        """Starts the first worker and returns the description of the plug-in that it sends.

        Raises:
            InputError: the plug-in cannot be loaded.
        """
        self._is_trial = True
        self.post(self._start)
        self.wait(lambda: self._loaded is not None)
        return self._loaded or {}

    def post(self, command: Callable[[], object]) -> None:
        """Queues a callable for the pool's thread and returns at once; raises the thread's error if it has ended."""
        if self._error is not None:
            raise self._error
        self._commands.append(command)
        self._alert()

    def wait(self, is_ready: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until `is_ready()` is true, but at most `timeout_s`; raises the thread's error if it has ended."""
        with self.changed:
            self.changed.wait_for(lambda: self._error or is_ready(), timeout_s)
            if self._error is not None and not is_ready():
                raise self._error

    @property
    def is_open(self) -> bool:
        return self._error is None

    def close(self) -> None:
        """Kills all workers and waits until they have exited."""
        self._is_closing = True
        self._alert()
        self._thread.join()
        os.close(self._alarm)
        os.close(self._ring)

    def _alert(self) -> None:
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes up anyway
            os.write(self._ring, b"x")

    # The methods below run in the pool's thread.

    def _run(self) -> None:
        try:
            while not self._is_closing:
                deadlines = [worker.deadline(self.limits) for worker in self._workers]
                timeout_s = min(deadlines, default=math.inf) - time.monotonic()
                for worker, answers in wait_for_answers(self._workers, timeout_s=timeout_s, alarm=self._alarm):
                    self._receive(worker, answers)
                while self._commands:
                    self._commands.popleft()()
                for worker in tuple(self._workers):
                    if worker.deadline(self.limits) <= time.monotonic():
                        limit_s = self.limits.timeout_s if worker.is_loaded else self.limits.load_timeout_s
                        self._lose(worker, Failure("timeout", f"took more than {limit_s:g} s"))
                for jobs in (self._suspects, self._waiting):
                    while jobs and (worker := self._worker_for(jobs[0])):
                        job = jobs.popleft()
                        worker.jobs[job.number] = job
                for worker in self._workers:
                    self._dispatch(worker)
            self._error = WorkersLostError(f"{self._name}: its processes have been closed")
        except BaseException as error:  # waiting callers must learn of it
            self._error = error
        finally:
            self.notify()
            for worker in self._workers:
                worker.kill()

    def notify(self) -> None:
        """Wakes up the callers in `wait`, which check their conditions again."""
        with self.changed:
            self.changed.notify_all()

    def add(self, job: Job) -> None:
        """Queues a job for the next free worker."""
        (self._suspects if job.is_suspect else self._waiting).append(job)

    def _start(self) -> None:
        worker = Worker(self._program, self._environment, is_retry=self._start_failed)
        self._workers.append(worker)
        worker.send(self._order)
        worker.load_deadline = time.monotonic() + self.limits.load_timeout_s

    def _worker_for(self, job: Job) -> Worker | None:
        """Returns the worker with the fewest jobs, or a new one if all are busy; None if none can take the job now."""
        takers = [worker for worker in self._workers if _can_take(worker, job)]
        num_unused = sum(not worker.jobs and not worker.is_loaded for worker in self._workers)
        if (
            all(worker.jobs for worker in takers)
            and len(self._workers) < self.limits.workers
            and num_unused < len(self._suspects) + len(self._waiting)
        ):
            self._start()
            return self._worker_for(job)
        return min(takers, key=lambda worker: len(worker.jobs), default=None)

    def _dispatch(self, worker: Worker) -> None:
        """Sends requests to a worker up to its concurrency; a suspect runs alone."""
        running, limit = worker.running, self.limits.concurrency
        if not worker.is_loaded or len(running) == limit:
            return
        ready = [job for job in worker.jobs.values() if job.num_sent < len(job.requests) and job.current is None]
        for job in sorted(ready, key=lambda job: not job.is_suspect):
            is_alone = any(one.is_suspect for one in (job, *running.values()))
            if len(running) >= (1 if is_alone else limit):
                return
            request = job.current = job.requests[job.num_sent]
            job.num_sent += 1
            job.sent_at = time.monotonic()
            running[job.number] = job
            worker.send({"key": job.number, "is_last": request.is_last, **request.fields})

    def _receive(self, worker: Worker, answers: list[dict[str, Any]] | None) -> None:
        if answers is None:
            self._lose(worker, None)
        for answer in answers or ():
            if worker not in self._workers:  # lost while an earlier answer was handled
                return
            finish = self._finish if worker.is_loaded else self._finish_load
            finish(worker, answer)

    def _finish_load(self, worker: Worker, answer: Mapping[str, Any]) -> None:
        if "refused" in answer:
            text = one_line(redact(str(answer["refused"])))
            if any(sign in text for sign in OUT_OF_MEMORY_SIGNS):
                text += f"; if it needs more than plugins.memory_mib = {self.limits.memory_mib}, raise this setting"
            self._lose(worker, Failure("refused", text))
            return
        if not isinstance(answer.get("loaded"), dict):
            self._lose(worker, INVALID_ANSWER)
            return
        worker.is_loaded = True
        worker.load_deadline = math.inf
        self._start_failed = False
        if self._loaded is None:
            self._loaded = answer["loaded"]
            self.notify()

    def _finish(self, worker: Worker, answer: Mapping[str, Any]) -> None:
        try:
            job = worker.running[answer["key"]]
            failure = read_failure(answer["failure"]) if "failure" in answer else None
            reply = job.read(answer) if failure is None else None
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            self._lose(worker, INVALID_ANSWER)
            return
        if failure is not None and failure.kind == "memory":  # the memory may stay allocated
            self._lose(worker, failure)
            return
        worker.num_answers += 1
        del worker.running[job.number]
        request, job.current = job.current, None
        assert request is not None
        is_over = request.is_last or failure is not None or answer.get("is_over") is True
        if is_over:
            del worker.jobs[job.number]
        if not job.is_wanted:
            return
        is_new = request.reply is None
        seconds = time.monotonic() - job.sent_at
        failure = failure or job.accept(request, reply, seconds=seconds)
        if failure is not None:
            self._fail(job, failure, request)
            return
        job.is_suspect &= not is_new
        self.notify()

    def _fail(self, job: Job, failure: Failure, request: Request | None) -> None:
        job.fail(failure, request)
        job.leave()
        self.notify()

    def _lose(self, worker: Worker, failure: Failure | None) -> None:
        """Kills a worker and recovers its jobs.

        Args:
            failure: why it is killed; None if it has exited by itself.

        Raises:
            InputError: the worker was started by `load` and cannot start.
            WorkersLostError: the worker could not start, and neither could the previous one.
        """
        status = worker.kill()
        self._workers.remove(worker)
        failure = failure or Failure("exit", describe_exit(status))
        if not worker.is_loaded:
            is_told = failure.kind == "refused"
            why = failure.text if is_told else f"during the import, it {failure.text.removeprefix('its process ')}"
            if self._is_trial and self._loaded is None:
                raise InputError(f"{self._name}: {why}{'' if is_told else '; fix the code that runs on import'}")
            if worker.is_retry:
                raise WorkersLostError(
                    f"{self._name}: two attempts to start a process have failed: {why}. Fix this and run the "
                    "command again (for grpo train, with --resume auto)"
                )
            self._start_failed = True
        is_certain = failure.kind == "timeout" and len(worker.running) == 1
        for job in worker.jobs.values():
            if not job.is_wanted:  # it was about to close
                continue
            request = job.current
            may_be_guilty = worker.is_loaded and (request is not None or not worker.running)
            is_guilty = may_be_guilty and (is_certain or job.is_suspect)
            job.is_suspect |= may_be_guilty
            job.num_sent, job.current = 0, None
            if is_guilty:
                self._fail(job, failure, request)
            else:
                self.add(job)


def _can_take(worker: Worker, job: Job) -> bool:
    is_used = bool(worker.jobs) or (job.is_suspect and worker.num_answers > 0)
    return job.shares_worker or (worker.is_loaded and not is_used)


def read_failure(pair: Sequence[Any]) -> Failure:
    """Converts the kind and text that a worker sent; raises ValueError or TypeError if they are not a valid pair."""
    kind, text = pair
    return Failure(one_line(str(kind)), one_line(redact(str(text))))
