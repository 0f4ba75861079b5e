"""The worker processes of one plug-in: a single thread starts, feeds, supervises, kills and replaces them.

A worker leads its own process group, so that its child processes are killed with it. It inherits few environment
variables and no open files, and exits when this process does.
"""

from __future__ import annotations

import math
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.plugins.loading import LoadError
from app.plugins.printable import one_line
from app.plugins.values import EXTRA_NAME_PATTERN, MAX_EXTRAS
from app.plugins.worker_process import (
    WorkerProcess,
    describe_exit,
    raise_if_refused,
    wait_for_answers,
    worker_environment,
)
from app.reward.reward_outcome import RewardFailure, RewardOutcome
from settings.loading.secrets import redact

INVALID_ANSWER = RewardFailure("exit", "its process sent an invalid answer")

WORKER_PROGRAM = "app.reward.worker_main"

Answer = dict[str, Any] | RewardFailure
"""Message of a worker, or its failure."""
Result = list[RewardOutcome] | RewardFailure
"""Outcomes of a call, or the failure of the whole call."""


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """The resources that a plug-in may use."""

    timeout_s: float
    cpu_s: int
    memory_mib: int
    load_timeout_s: float


class RewardWorker(WorkerProcess):
    """A worker that serves one call at a time."""

    num_calls = 0
    call_index: int | None = None
    """Index of its current call; None while it is idle or loading."""

    @property
    def is_idle(self) -> bool:
        return self.is_loaded and self.call_index is None


class ProcessPool:
    """A pool of at most `num_workers` workers that have loaded one function; they are kept between training steps.

    Args:
        function: `module:name` or `file.py:name`.
        environment: names of environment variables passed to workers in addition to `ALLOWED_ENVIRONMENT`.
    """

    def __init__(
        self, function: str, *, num_workers: int, limits: ResourceLimits, environment: Sequence[str] = ()
    ) -> None:
        self.function = function
        self.num_workers = num_workers
        self.limits = limits
        self._environment = worker_environment(environment)
        self._load_cpu_s = max(limits.load_timeout_s, limits.cpu_s)
        self._workers: list[RewardWorker] = []
        self._start_failed = False
        """Whether the last start of a worker failed."""

    def load(self) -> dict[str, Any]:
        """Starts the first worker and returns its description of the function.

        Raises:
            LoadError: the function cannot be loaded.
        """
        worker = self._start()
        try:
            while True:
                for ready, answer in self._wait():
                    if ready is worker:
                        return self._finish_load(worker, answer)
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[Mapping[str, Any]], *, fresh: bool = False) -> list[Result]:
        """Returns the result of each request, in the order of the requests.

        Args:
            fresh: whether each request needs a new worker, which has not served any other request.

        Raises:
            LoadError: a worker had to be replaced, and its replacement failed twice to start.
        """
        results: dict[int, Result] = {}
        waiting = deque(range(len(requests)))
        try:
            # Workers that have died since the last call must not get a request.
            for worker, answer in self._wait(timeout_s=0) if self._workers else ():
                self._handle_answer(worker, answer, results)
            while len(results) < len(requests):
                for worker in [w for w in self._workers if fresh and w.is_idle and w.num_calls]:
                    self._end(worker)
                self._dispatch(waiting, requests)
                for worker, answer in self._wait():
                    self._handle_answer(worker, answer, results)
        except BaseException:
            self.close()
            raise
        return [results[index] for index in range(len(requests))]

    def close(self) -> None:
        """Kills all workers and waits until they have exited."""
        while self._workers:
            self._workers.pop().kill()

    def _start(self) -> RewardWorker:
        worker = RewardWorker(WORKER_PROGRAM, self._environment)
        worker.is_retry = self._start_failed
        self._workers.append(worker)
        limits = {"memory_mib": self.limits.memory_mib, "cpu_s": self.limits.cpu_s, "load_cpu_s": self._load_cpu_s}
        worker.send({"function": self.function, **limits}, timeout_s=self.limits.load_timeout_s)
        return worker

    def _end(self, worker: RewardWorker) -> int:
        self._workers.remove(worker)
        return worker.kill()

    def _dispatch(self, waiting: deque[int], requests: Sequence[Mapping[str, Any]]) -> None:
        """Sends requests to idle workers, and starts more workers while requests are waiting."""
        for worker in self._workers:
            if waiting and worker.is_idle:
                worker.call_index = waiting.popleft()
                worker.num_calls += 1
                worker.send({**requests[worker.call_index], "call": worker.num_calls}, timeout_s=self.limits.timeout_s)
        num_loading = sum(not worker.is_loaded for worker in self._workers)
        for _ in range(min(self.num_workers - len(self._workers), len(waiting) - num_loading)):
            self._start()

    def _wait(self, timeout_s: float = float("inf")) -> list[tuple[RewardWorker, Answer]]:
        """Waits for an event of a worker; returns the answers, and the failures of dead and overdue workers."""
        nearest = min(worker.deadline for worker in self._workers) - time.monotonic()
        events = wait_for_answers(self._workers, timeout_s=min(nearest, timeout_s))
        answered = [(worker, self._check(worker, answers)) for worker, answers in events]
        now = time.monotonic()
        served = [worker for worker, _ in answered]
        for worker in [w for w in self._workers if w.deadline <= now and w not in served]:
            seconds = self.limits.timeout_s if worker.is_loaded else self.limits.load_timeout_s
            self._end(worker)
            answered.append((worker, RewardFailure("timeout", f"took more than {seconds:g} s")))
        return answered

    def _check(self, worker: RewardWorker, answers: list[dict[str, Any]] | None) -> Answer:
        """Returns the answer to the worker's call; ends a worker that has exited, or has answered more than once."""
        if answers and len(answers) == 1:
            return answers[0]
        status = self._end(worker)
        if status == -signal.SIGXCPU:
            seconds = self.limits.cpu_s if worker.is_loaded else self._load_cpu_s
            return RewardFailure("cpu", f"used more than {seconds:g} s of processor time")
        return RewardFailure("exit", describe_exit(status))

    def _finish_load(self, worker: RewardWorker, answer: Answer) -> dict[str, Any]:
        if isinstance(answer, RewardFailure):
            raise LoadError(f"during the import, it {answer.text.removeprefix('its process ')}")
        raise_if_refused(answer, memory=f"reward.memory_mib = {self.limits.memory_mib}")
        worker.is_loaded = True
        worker.deadline = float("inf")
        return answer

    def _finish_load_or_retry(self, worker: RewardWorker, answer: Answer) -> None:
        """Finishes the start of a worker; the first failure is retried, because the machine may just be busy."""
        try:
            self._finish_load(worker, answer)
        except LoadError:
            if worker.is_retry:
                raise
            self._start_failed = True
            if worker in self._workers:
                self._end(worker)
        else:
            self._start_failed = False

    def _handle_answer(self, worker: RewardWorker, answer: Answer, results: dict[int, Result]) -> None:
        """Stores the result of a worker's call and makes the worker ready for the next one."""
        call, worker.call_index = worker.call_index, None
        if call is None:
            if not worker.is_loaded:
                self._finish_load_or_retry(worker, answer)
            elif worker in self._workers:  # an answer without a request
                self._end(worker)
            return
        worker.deadline = float("inf")
        result = answer if isinstance(answer, RewardFailure) else INVALID_ANSWER
        if isinstance(answer, dict) and answer.get("call") == worker.num_calls:
            result = parse_answer(answer)
        results[call] = result
        # After an invalid answer the pipe cannot be trusted; after a memory failure the memory may stay allocated.
        is_unusable = isinstance(result, RewardFailure) and (result == INVALID_ANSWER or result.kind == "memory")
        if is_unusable and worker in self._workers:
            self._end(worker)


def parse_answer(answer: Mapping[str, Any]) -> Result:
    """Parses a worker's answer and checks all of it, because the function could write to the same pipe."""
    try:
        if "failure" in answer:
            return _parse_failure(answer["failure"])
        return [_parse_outcome(outcome) for outcome in answer["outcomes"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return INVALID_ANSWER


def _parse_outcome(payload: Mapping[str, Any]) -> RewardOutcome:
    if "failure" in payload:
        return RewardOutcome(failure=_parse_failure(payload["failure"]))
    extras = payload.get("extras", {})
    if len(extras) > MAX_EXTRAS or not all(map(EXTRA_NAME_PATTERN.fullmatch, extras)):
        raise ValueError
    value = payload.get("value")
    return RewardOutcome(
        value=None if value is None else _parse_finite(value),
        extras={name: _parse_finite(x) for name, x in extras.items()},
    )


def _parse_finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _parse_failure(pair: Sequence[Any]) -> RewardFailure:
    kind, text = pair
    return RewardFailure(one_line(str(kind)), one_line(redact(str(text))))
