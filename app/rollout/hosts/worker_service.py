"""What another host than host 0 does in a rollout: its workers carry out commands of host 0."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from queue import Empty, SimpleQueue
from threading import Thread

from app.distributed.control_channel import POLL_INTERVAL_S, ControlChannel, HostLostError
from app.distributed.stop_check import StopCheck, StoppedError
from app.model.decode_weights import DecodeWeights
from app.records.sample import Prompt
from app.rollout.hosts import host_messages as messages
from app.rollout.scheduling.protocol import SegmentEnded
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.remote_worker import ServedRows, without_columns
from app.rollout.workers.scheduler_loop import WORKER_FAILURES, Reopen, SampleDoneCallback
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_drivers import ThreadedDriver

log = logging.getLogger(__name__)


class WorkerService:
    """This host's part of one rollout.

    Args:
        workers: open workers, each in its own thread of the driver.
        on_sample_done: called with every sample of this host when it is done.
        on_progress: called when the rollout makes progress on any host.
    """

    def __init__(
        self,
        channel: ControlChannel,
        driver: ThreadedDriver,
        workers: Sequence[RolloutWorker],
        *,
        rollout: int,
        reopen: Reopen,
        stop_requested: StopCheck,
        on_sample_done: SampleDoneCallback | None,
        on_progress: Callable[[], None],
    ):
        self.rollout, self._reopen = rollout, reopen
        self._stop_requested = stop_requested
        self._on_sample_done, self._on_progress = on_sample_done, on_progress
        self._num_rows = 0
        self._prompts: dict[int, Prompt] = {}
        """Prompts of rows that are not done, by number."""
        self._done: dict[int, RolloutSequence] = {}
        self.has_ended = False
        """Whether the rollout is over on all hosts."""
        self._channel = channel
        self._driver = driver
        self._workers = {worker.name: worker for worker in workers}
        self._served = {worker.name: ServedRows(worker) for worker in workers}
        self._given_up: SimpleQueue[str] = SimpleQueue()
        """Names of failed workers that run nothing."""
        self._caches: dict[int, Future[SuspendedSequence]] = {}
        self._news: SimpleQueue[messages.RowDone | messages.Progress | messages.Ended | BaseException] = SimpleQueue()
        self._reporter = Thread(target=self._report_outcomes, name="worker-service", daemon=True)
        self._reporter.start()

    def join(self) -> None:
        """Joins the rollout with the workers of this host."""
        workers = [messages.WorkerInfo(worker.name, worker.kind, worker.device) for worker in self._workers.values()]
        self._send(messages.Joined(workers))

    def _send(self, message: messages.ToFirstHost) -> None:
        self._channel.send((self.rollout, message))

    def submit(self, rows: Iterable[RolloutSequence]) -> range:
        """Submits rows, as the next round if there are several; returns their numbers."""
        sent = list(rows)
        numbers = range(self._num_rows, self._num_rows + len(sent))
        self._num_rows += len(sent)
        self._prompts |= {number: row.prompt for number, row in zip(numbers, sent, strict=True)}
        copies = [replace(copy, opening=row.opening) for copy, row in zip(without_columns(sent), sent, strict=True)]
        self._send(messages.Submitted(copies))
        return numbers

    def is_done(self, numbers: Iterable[int]) -> bool:
        """Returns whether all of these rows are done."""
        while not self._news.empty():
            self._handle_news()
        return all(number in self._done for number in numbers)

    def wait_for_row(self, number: int) -> RolloutSequence:
        """Waits until a submitted row is done, and returns it once.

        Raises:
            StoppedError: a stop was requested, here or on host 0.
            RuntimeError: the rollout has failed on host 0.
            HostLostError: the connection to host 0 is lost.
            Exception: an error of a worker that is a bug.
        """
        while number not in self._done:
            if self.has_ended:
                raise StoppedError
            self._handle_news()
        return self._done.pop(number)

    def wait_for_end(self) -> None:
        """Waits until the rollout is over on all hosts; raises what `wait_for_row` does."""
        while not self.has_ended:
            self._handle_news()

    def publish(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Sets the weights for all segments that start from now on, and opens failed workers again with them."""
        for worker in list(self._workers.values()):
            worker.queue_weights(weights, policy_version=policy_version)
        for _ in range(self._given_up.qsize()):
            self._open_again(self._given_up.get(), weights, policy_version)

    def _open_again(self, name: str, weights: DecodeWeights, policy_version: int) -> None:
        worker = self._workers[name]
        worker.close()
        if not self._reopen(worker, weights, policy_version):
            self._given_up.put(name)
            return
        self._served[worker.name] = ServedRows(worker)
        self._workers[worker.name] = self._workers.pop(name)
        self._driver.add(worker)
        self._send(messages.Reopened(name))

    def _handle_news(self) -> None:
        if self._stop_requested():
            raise StoppedError
        try:
            news = self._news.get(timeout=POLL_INTERVAL_S)
        except Empty:
            return
        self._on_progress()
        match news:
            case BaseException():
                raise news
            case messages.RowDone():
                _, number = news.row.home
                # Host 0 has no more of the prompt than slots read.
                news.row.prompt = self._prompts.pop(number)
                self._done[number] = news.row
                if self._on_sample_done is not None:
                    self._on_sample_done(news.row)
            case messages.Ended() if news.error is not None:
                raise RuntimeError(f"on host 0, which schedules the workers of all hosts: {news.error}")
            case messages.Ended() if news.is_stop:
                raise StoppedError
            case messages.Ended():
                self.has_ended = True

    def close(self) -> None:
        """Ends the reports, once the driver is closed."""
        self._driver.wake()
        self._reporter.join()

    # In the channel's thread -------------------------------------------------------------------------------------

    def receive(self, message: messages.FromFirstHost) -> None:
        """Handles a message of host 0 without waiting for a worker."""
        match message:
            case messages.StartSegment():
                self._start_segment(message)
            case messages.GiveUp():
                self._given_up.put(message.worker)
            case messages.SuspendRow():
                row = self._served[message.worker].take(message.uid)
                self._caches[message.key] = self._driver.suspend(self._workers[message.worker], row)
            case _:
                self._news.put(message)

    def lose(self) -> None:
        """Handles the loss of the connection."""
        self._news.put(HostLostError("the connection to host 0, which schedules the workers of all hosts, is lost"))

    def _start_segment(self, message: messages.StartSegment) -> None:
        for key in message.unused:
            self._caches.pop(key, None)
        caches = {uid: self._caches.pop(key) for uid, key in message.caches.items()}
        worker = message.command.worker
        self._served[worker].admit(message.admissions)
        admissions = deque(one._replace(suspended=caches.get(one.uid)) for one in message.admissions)
        self._driver.run_segment(self._workers[worker], message.command, admissions)

    # In the threads of the workers and of the reports ------------------------------------------------------------

    def _report_outcomes(self) -> None:
        try:
            while (outcome := self._driver.next_outcome()) is not None:
                self._report(*outcome)
        # Every exception: the main thread raises it, so that host 0 does not wait for this result.
        except BaseException as error:
            self._news.put(error)

    def _report(self, worker: RolloutWorker, result: SegmentEnded | BaseException) -> None:
        if isinstance(result, BaseException):
            log.warning("rollout worker %s failed; its samples continue on other workers", worker.name, exc_info=result)
            if not isinstance(result, WORKER_FAILURES):
                self._news.put(result)
            worker.close()
            self._send(messages.SegmentResult(worker.name, f"{type(result).__name__}: {result}"))
        else:
            ended = self._served[worker.name].segment_result(result)
            self._send(messages.SegmentResult(worker.name, ended))
