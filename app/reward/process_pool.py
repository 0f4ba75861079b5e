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

from app.reward.reward_outcome import Failure, Outcome, one_line
from app.reward.worker_main import EXTRA_NAME, MOST_EXTRAS
from app.reward.worker_process import Worker, worker_environment

NONSENSE = Failure("exit", "its process gave an answer that is none")

SIGNS_OF_TOO_LITTLE_MEMORY = ("MemoryError", "allocate memory", "failed to map segment")


@dataclass(frozen=True, slots=True)
class Limits:
    """What a plug-in may use."""

    timeout_s: float
    cpu_s: int
    memory_mib: int
    load_timeout_s: float


class LoadError(Exception):
    """A plug-in that no worker can be started with; the message says why."""


class LateError(LoadError):
    """One whose import takes longer than it may."""


class WorkerPool:
    """At most `num_workers` workers with one function loaded, kept from one step to the next.

    Args:
        function: `module:name` or `file.py:name`.
        environment: names of environment variables that workers see besides `PASSED_ON`.
    """

    def __init__(self, function: str, *, num_workers: int, limits: Limits, environment: Sequence[str] = ()) -> None:
        self.function = function
        self.num_workers = num_workers
        self.limits = limits
        self._environment = worker_environment(environment)
        self._workers: list[Worker] = []
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
                        return self._loaded(worker, answer)
        except BaseException:
            self.close()
            raise

    def run(self, requests: Sequence[Mapping[str, Any]], *, fresh: bool = False) -> list[list[Outcome] | Failure]:
        """What came of each request, in their order, whichever worker it went to and whenever that was done.

        Args:
            fresh: each in a worker that has served none before.

        Raises:
            LoadError: a worker had to be replaced, and its successor cannot be started, twice.
        """
        answers: dict[int, list[Outcome] | Failure] = {}
        waiting = deque(range(len(requests)))
        try:
            self._bury()
            while len(answers) < len(requests):
                self._retire(used=fresh)
                self._feed(waiting, requests)
                for worker, answer in self._wait():
                    self._take(worker, answer, answers)
        except BaseException:
            self.close()
            raise
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        """Ends every worker, and waits until it is gone."""
        while self._workers:
            self._workers.pop().end()

    @property
    def _load_cpu_s(self) -> float:
        return max(self.limits.load_timeout_s, self.limits.cpu_s)

    def _start(self) -> Worker:
        worker = Worker(self._environment)
        worker.is_second_try = self._start_failed
        self._workers.append(worker)
        order = {
            "function": self.function,
            "memory_mib": self.limits.memory_mib,
            "cpu_s": self.limits.cpu_s,
            "load_cpu_s": self._load_cpu_s,
        }
        worker.send(order, timeout_s=self.limits.load_timeout_s)
        return worker

    def _bury(self) -> None:
        """Finds out which workers have died since the last call, before one of them is given something to do."""
        for worker, answer in self._wait(at_most_s=0) if self._workers else ():
            self._take(worker, answer, {})

    def _retire(self, *, used: bool) -> None:
        for worker in [w for w in self._workers if used and w.is_idle and w.num_calls]:
            self._end(worker)

    def _end(self, worker: Worker) -> int:
        self._workers.remove(worker)
        return worker.end()

    def _feed(self, waiting: deque[int], requests: Sequence[Mapping[str, Any]]) -> None:
        """Gives idle workers something to do, and starts more while there is more than they can take."""
        for worker in self._workers:
            if waiting and worker.is_idle:
                worker.call = waiting.popleft()
                worker.num_calls += 1
                worker.send({**requests[worker.call], "call": worker.num_calls}, timeout_s=self.limits.timeout_s)
        num_loading = sum(not worker.is_loaded for worker in self._workers)
        for _ in range(min(self.num_workers - len(self._workers), len(waiting) - num_loading)):
            self._start()

    def _wait(self, at_most_s: float = float("inf")) -> list[tuple[Worker, dict[str, Any] | Failure]]:
        """Waits until a worker has answered, has died or is late."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.reading, selectors.EVENT_READ, worker)
                if worker.prints.is_open:
                    selector.register(worker.prints.pipe, selectors.EVENT_READ, worker)
                if worker.outgoing:
                    selector.register(worker.writing, selectors.EVENT_WRITE, worker)
            nearest = min(worker.deadline for worker in self._workers) - time.monotonic()
            patience = min(max(nearest, 0), at_most_s)
            events = selector.select(None if patience == float("inf") else patience)
        answered: list[tuple[Worker, dict[str, Any] | Failure]] = []
        for key, event in events:
            worker = key.data
            if worker not in self._workers:  # died at an earlier event
                continue
            if event & selectors.EVENT_WRITE:
                worker.write()
            elif key.fd == worker.prints.pipe:
                worker.prints.read()
            elif (answer := self._read(worker)) is not None:
                answered.append((worker, answer))
        late = time.monotonic()
        served = [worker for worker, _ in answered]
        for worker in [w for w in self._workers if w.deadline <= late and w not in served]:
            seconds = self.limits.timeout_s if worker.is_loaded else self.limits.load_timeout_s
            self._end(worker)
            answered.append((worker, Failure("timeout", f"took more than {seconds:g} s")))
        return answered

    def _read(self, worker: Worker) -> dict[str, Any] | Failure | None:
        try:
            return worker.read()
        except EOFError:
            status = self._end(worker)
        if status == -signal.SIGXCPU:
            seconds = self.limits.cpu_s if worker.is_loaded else self._load_cpu_s
            return Failure("cpu", f"used more than {seconds:g} s of processor time")
        if status < 0:
            return Failure("exit", f"its process was ended by {_name_of_signal(-status)}")
        return Failure("exit", f"its process ended with exit code {status}")

    def _loaded(self, worker: Worker, answer: dict[str, Any] | Failure) -> dict[str, Any]:
        if isinstance(answer, Failure):
            kind = LateError if answer.kind == "timeout" else LoadError
            raise kind(f"while it was imported, it {_as_predicate(answer.text)}")
        if "refused" in answer:
            text = one_line(str(answer["refused"]))
            is_memory = any(sign in text for sign in SIGNS_OF_TOO_LITTLE_MEMORY)
            hint = f"; it may need more than reward.memory_mib = {self.limits.memory_mib}" if is_memory else ""
            raise LoadError(text + hint)
        worker.is_loaded = True
        worker.deadline = float("inf")
        return answer

    def _loaded_at_last(self, worker: Worker, answer: dict[str, Any] | Failure) -> None:
        """As `_loaded`, but a start that fails is tried again: a busy machine is no reason to end a run."""
        try:
            self._loaded(worker, answer)
        except LoadError:
            if worker.is_second_try:
                raise
            self._start_failed = True
            if worker in self._workers:
                self._end(worker)
        else:
            self._start_failed = False

    def _take(
        self, worker: Worker, answer: dict[str, Any] | Failure, answers: dict[int, list[Outcome] | Failure]
    ) -> None:
        """Notes what a worker said, and makes it ready for the next call."""
        call, worker.call = worker.call, None
        if call is None:
            if not worker.is_loaded:
                self._loaded_at_last(worker, answer)
            elif worker in self._workers:  # it spoke without being asked
                self._end(worker)
            return
        worker.deadline = float("inf")
        outcome = answer if isinstance(answer, Failure) else NONSENSE
        if isinstance(answer, dict) and answer.get("call") == worker.num_calls:
            outcome = _understood(answer)
        answers[call] = outcome
        # What it says may be another's word from now on; what it could not give back may be all of its memory.
        is_spoilt = isinstance(outcome, Failure) and (outcome == NONSENSE or outcome.kind == "memory")
        if is_spoilt and worker in self._workers:
            self._end(worker)


def _understood(answer: Mapping[str, Any]) -> list[Outcome] | Failure:
    """What a worker says, of which nothing is taken on trust: the function can write to the same pipe."""
    try:
        if "failure" in answer:
            return _failure(answer["failure"])
        return [_outcome(said) for said in answer["outcomes"]]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return NONSENSE


def _outcome(said: Mapping[str, Any]) -> Outcome:
    if "failure" in said:
        return Outcome(failure=_failure(said["failure"]))
    extras = said.get("extras", {})
    if len(extras) > MOST_EXTRAS or not all(map(EXTRA_NAME.fullmatch, extras)):
        raise ValueError
    value = said.get("value")
    return Outcome(
        value=None if value is None else _finite(value), extras={name: _finite(x) for name, x in extras.items()}
    )


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError
    return float(value)


def _failure(pair: Sequence[Any]) -> Failure:
    kind, text = pair
    return Failure(one_line(str(kind)), one_line(str(text)))


def _as_predicate(text: str) -> str:
    """`its process ended with ...` as the end of a sentence about the plug-in."""
    return text.removeprefix("its process ")


def _name_of_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
