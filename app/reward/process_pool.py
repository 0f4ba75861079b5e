"""Worker processes of one plug-in: started, fed, watched, killed and replaced, by a single thread.

A worker leads a process group of its own, so that it dies together with whatever it started. It sees few environment
variables and none of our files, and ends by itself when this process is gone.
"""

from __future__ import annotations

import math
import selectors
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.reward.reward_outcome import RewardFailure, RewardOutcome, one_line
from app.reward.worker_main import EXTRA_NAME_PATTERN, MAX_EXTRAS
from app.reward.worker_process import WorkerProcess, worker_environment

INVALID_ANSWER = RewardFailure("exit", "its process gave an answer that is none")

OUT_OF_MEMORY_SIGNS = ("MemoryError", "allocate memory", "failed to map segment")


@dataclass(frozen=True, slots=True)
class ResourceLimits:
    """What a plug-in may use."""

    timeout_s: float
    cpu_s: int
    memory_mib: int
    load_timeout_s: float


class LoadError(Exception):
    """A plug-in that no worker can be started with; the message says why."""


class LoadTimeoutError(LoadError):
    """One whose import takes longer than it may."""


class ProcessPool:
    """At most `num_workers` workers with one function loaded, kept from one step to the next.

    Args:
        function: `module:name` or `file.py:name`.
        environment: names of environment variables that workers see besides `PASSED_ON`.
    """

    def __init__(
        self, function: str, *, num_workers: int, limits: ResourceLimits, environment: Sequence[str] = ()
    ) -> None:
        self.function = function
        self.num_workers = num_workers
        self.limits = limits
        self._environment = worker_environment(environment)
        self._workers: list[WorkerProcess] = []
        self._start_failed = False
        """Since a worker was last loaded."""

    def load(self) -> dict[str, Any]:
        """Starts the first worker; returns what it says of the function.

        Raises:
            LoadError: the function cannot be used.
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

    def run(
        self, requests: Sequence[Mapping[str, Any]], *, fresh: bool = False
    ) -> list[list[RewardOutcome] | RewardFailure]:
        """What came of each request, in their order, whichever worker it went to and whenever that was done.

        Args:
            fresh: each in a worker that has served none before.

        Raises:
            LoadError: a worker had to be replaced, and its successor cannot be started, twice.
        """
        answers: dict[int, list[RewardOutcome] | RewardFailure] = {}
        waiting = deque(range(len(requests)))
        try:
            self._reap_dead()
            while len(answers) < len(requests):
                self._end_used(used=fresh)
                self._dispatch(waiting, requests)
                for worker, answer in self._wait():
                    self._handle_answer(worker, answer, answers)
        except BaseException:
            self.close()
            raise
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        """Ends every worker, and waits until it is gone."""
        while self._workers:
            self._workers.pop().kill()

    @property
    def _load_cpu_s(self) -> float:
        return max(self.limits.load_timeout_s, self.limits.cpu_s)

    def _start(self) -> WorkerProcess:
        worker = WorkerProcess(self._environment)
        worker.is_retry = self._start_failed
        self._workers.append(worker)
        order = {
            "function": self.function,
            "memory_mib": self.limits.memory_mib,
            "cpu_s": self.limits.cpu_s,
            "load_cpu_s": self._load_cpu_s,
        }
        worker.send(order, timeout_s=self.limits.load_timeout_s)
        return worker

    def _reap_dead(self) -> None:
        """Finds out which workers have died since the last call, before one of them is given something to do."""
        for worker, answer in self._wait(timeout_s=0) if self._workers else ():
            self._handle_answer(worker, answer, {})

    def _end_used(self, *, used: bool) -> None:
        for worker in [w for w in self._workers if used and w.is_idle and w.num_calls]:
            self._end(worker)

    def _end(self, worker: WorkerProcess) -> int:
        self._workers.remove(worker)
        return worker.kill()

    def _dispatch(self, waiting: deque[int], requests: Sequence[Mapping[str, Any]]) -> None:
        """Gives idle workers something to do, and starts more while there is more than they can take."""
        for worker in self._workers:
            if waiting and worker.is_idle:
                worker.call_index = waiting.popleft()
                worker.num_calls += 1
                worker.send({**requests[worker.call_index], "call": worker.num_calls}, timeout_s=self.limits.timeout_s)
        num_loading = sum(not worker.is_loaded for worker in self._workers)
        for _ in range(min(self.num_workers - len(self._workers), len(waiting) - num_loading)):
            self._start()

    def _wait(self, timeout_s: float = float("inf")) -> list[tuple[WorkerProcess, dict[str, Any] | RewardFailure]]:
        """Waits until a worker has answered, has died or is late."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.read_fd, selectors.EVENT_READ, worker)
                if worker.stderr_relay.is_open:
                    selector.register(worker.stderr_relay.fd, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(worker.write_fd, selectors.EVENT_WRITE, worker)
            nearest = min(worker.deadline for worker in self._workers) - time.monotonic()
            patience = min(max(nearest, 0), timeout_s)
            events = selector.select(None if patience == float("inf") else patience)
        answered: list[tuple[WorkerProcess, dict[str, Any] | RewardFailure]] = []
        for key, event in events:
            worker = key.data
            if worker not in self._workers:  # died at an earlier event
                continue
            if event & selectors.EVENT_WRITE:
                worker.write()
            elif key.fd == worker.stderr_relay.fd:
                worker.stderr_relay.read()
            elif (answer := self._read(worker)) is not None:
                answered.append((worker, answer))
        late = time.monotonic()
        served = [worker for worker, _ in answered]
        for worker in [w for w in self._workers if w.deadline <= late and w not in served]:
            seconds = self.limits.timeout_s if worker.is_loaded else self.limits.load_timeout_s
            self._end(worker)
            answered.append((worker, RewardFailure("timeout", f"took more than {seconds:g} s")))
        return answered

    def _read(self, worker: WorkerProcess) -> dict[str, Any] | RewardFailure | None:
        try:
            return worker.read()
        except EOFError:
            status = self._end(worker)
        if status == -signal.SIGXCPU:
            seconds = self.limits.cpu_s if worker.is_loaded else self._load_cpu_s
            return RewardFailure("cpu", f"used more than {seconds:g} s of processor time")
        if status < 0:
            return RewardFailure("exit", f"its process was ended by {_signal_name(-status)}")
        return RewardFailure("exit", f"its process ended with exit code {status}")

    def _finish_load(self, worker: WorkerProcess, answer: dict[str, Any] | RewardFailure) -> dict[str, Any]:
        if isinstance(answer, RewardFailure):
            kind = LoadTimeoutError if answer.kind == "timeout" else LoadError
            raise kind(f"while it was imported, it {_as_predicate(answer.text)}")
        if "refused" in answer:
            text = one_line(str(answer["refused"]))
            is_memory = any(sign in text for sign in OUT_OF_MEMORY_SIGNS)
            hint = f"; it may need more than reward.memory_mib = {self.limits.memory_mib}" if is_memory else ""
            raise LoadError(text + hint)
        worker.is_loaded = True
        worker.deadline = float("inf")
        return answer

    def _finish_load_or_retry(self, worker: WorkerProcess, answer: dict[str, Any] | RewardFailure) -> None:
        """As `_loaded`, but a start that fails is tried again: a busy machine is no reason to end a run."""
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

    def _handle_answer(
        self,
        worker: WorkerProcess,
        answer: dict[str, Any] | RewardFailure,
        answers: dict[int, list[RewardOutcome] | RewardFailure],
    ) -> None:
        """Notes what a worker said, and makes it ready for the next call."""
        call, worker.call_index = worker.call_index, None
        if call is None:
            if not worker.is_loaded:
                self._finish_load_or_retry(worker, answer)
            elif worker in self._workers:  # it spoke without being asked
                self._end(worker)
            return
        worker.deadline = float("inf")
        outcome = answer if isinstance(answer, RewardFailure) else INVALID_ANSWER
        if isinstance(answer, dict) and answer.get("call") == worker.num_calls:
            outcome = _parse_answer(answer)
        answers[call] = outcome
        # What it says may be another's word from now on; what it could not give back may be all of its memory.
        is_spoilt = isinstance(outcome, RewardFailure) and (outcome == INVALID_ANSWER or outcome.kind == "memory")
        if is_spoilt and worker in self._workers:
            self._end(worker)


def _parse_answer(answer: Mapping[str, Any]) -> list[RewardOutcome] | RewardFailure:
    """What a worker says, of which nothing is taken on trust: the function can write to the same pipe."""
    try:
        if "failure" in answer:
            return _parse_failure(answer["failure"])
        return [_parse_outcome(said) for said in answer["outcomes"]]
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
    return RewardFailure(one_line(str(kind)), one_line(str(text)))


def _as_predicate(text: str) -> str:
    """`its process ended with ...` as the end of a sentence about the plug-in."""
    return text.removeprefix("its process ")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
