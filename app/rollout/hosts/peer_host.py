"""Another host, as seen by host 0, whose scheduler also uses that host's workers."""

from __future__ import annotations

import itertools
import logging
import math
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from app.distributed.control_channel import POLL_INTERVAL_S, ControlChannel, HostLostError
from app.distributed.stop_check import StopCheck, StoppedError
from app.rollout.hosts import host_messages as messages
from app.rollout.scheduling.protocol import RunSegment, WorkerKind
from app.rollout.sequence import RolloutSequence
from app.rollout.slots.slot_engine import SlotEngine
from app.rollout.workers.remote_worker import RemoteCache, RemoteSegment, RemoteWorker, without_columns
from app.rollout.workers.worker import Admission, take_all

log = logging.getLogger(__name__)


class HostWorkerError(RuntimeError):
    """A worker of another host has failed there."""


def do_nothing() -> None:
    """Does nothing: nobody waits."""


class PeerHost:
    """The connection to another host, which takes part in one rollout after the other."""

    def __init__(self, channel: ControlChannel):
        self.host = channel.host
        self._channel = channel
        self._rollout = 0
        self._inbox: SimpleQueue[tuple[int, messages.Joined | messages.Submitted | messages.Left] | None] = (
            SimpleQueue()
        )
        """Messages with their rollouts; None once the connection is lost."""
        self._num_rows = 0
        """Number of rows that the host has submitted to the rollout."""
        self.on_submitted: Callable[[], None] = do_nothing
        """Called in the channel's thread when the host has submitted rows, or has left."""
        self._last_left: float = 0
        """The last rollout that the host has left; infinity once it is lost."""
        self._last_stopped = 0
        """The last rollout that the host has left because it was asked to stop."""
        self._last_end = 0, messages.Ended()
        """The last rollout that has ended, and how."""
        self._segments: dict[str, Future[RemoteSegment]] = {}
        """Running segments by worker."""
        self._failures: dict[str, str] = {}
        """Why workers have failed that run no segment."""
        self.workers: dict[str, HostWorker] = {}
        """All workers of the host so far, by name."""
        self._cache_keys = itertools.count()
        self._unused_caches: deque[int] = deque()
        channel.start(self._receive, self._lose)

    def begin(self, rollout: int) -> None:
        """Begins the next rollout, which the host may already have joined."""
        self._rollout, self._num_rows = rollout, 0
        self._failures.clear()
        self.on_submitted = do_nothing

    def wait_for_workers(
        self, engines: Mapping[WorkerKind, SlotEngine], stop_requested: StopCheck
    ) -> Sequence[HostWorker]:
        """Waits until the host joins, and returns its workers; none if it has left.

        Args:
            engines: engines with the same slots as the host's.

        Raises:
            StoppedError: a stop was requested.
        """
        joined = self._wait(stop_requested)
        if not isinstance(joined, messages.Joined):
            return ()
        for one in joined.workers:
            if one.name not in self.workers:
                engine = engines[one.kind]
                self.workers[one.name] = HostWorker(one.name, one.kind, engine, one.device, host=self.host, peer=self)
            self.workers[one.name].reset(one.name)
        return [self.workers[one.name] for one in joined.workers]

    def wait_for_rows(self, stop_requested: StopCheck) -> Sequence[RolloutSequence]:
        """Waits until the host submits rows, and returns them; none if it has left.

        Raises:
            StoppedError: a stop was requested.
        """
        submitted = self._wait(stop_requested)
        return self._number_rows(submitted) if isinstance(submitted, messages.Submitted) else ()

    def take_rounds(self) -> list[Sequence[RolloutSequence]]:
        """Returns the rounds submitted since the last call."""
        rounds, of_next_rollout = [], []
        while not self._inbox.empty():
            match self._inbox.get():
                case (self._rollout, messages.Submitted() as submitted):
                    rounds.append(self._number_rows(submitted))
                case (rollout, _) as received if rollout > self._rollout:
                    of_next_rollout.append(received)
                case _:
                    pass
        for received in of_next_rollout:
            self._inbox.put(received)
        return rounds

    def _number_rows(self, submitted: messages.Submitted) -> Sequence[RolloutSequence]:
        for row in submitted.rows:
            row.home = self.host, self._num_rows
            self._num_rows += 1
        return submitted.rows

    def _wait(self, stop_requested: StopCheck) -> messages.Joined | messages.Submitted | messages.Left | None:
        """Returns the next message about the rollout; None if the connection is lost."""
        while not stop_requested():
            try:
                received = self._inbox.get(timeout=POLL_INTERVAL_S)
            except Empty:
                if self.has_left:
                    return None
                continue
            if received is None:
                return None
            rollout, message = received
            if rollout == self._rollout:
                return message
        raise StoppedError

    @property
    def has_left(self) -> bool:
        """Whether the host takes no further part in the rollout."""
        return self._last_left >= self._rollout

    @property
    def has_stopped(self) -> bool:
        """Whether the host has left because it was asked to stop."""
        return self._last_stopped == self._rollout

    def start_segment(
        self, command: RunSegment, admissions: Sequence[Admission], caches: Mapping[str, RemoteCache]
    ) -> Future[RemoteSegment]:
        """Raises HostLostError if the host has left."""
        ended = self._segments[command.worker] = Future()
        failure = self._failures.pop(command.worker, None)
        if failure is not None:
            self._end_segment(command.worker, failure)
            return ended
        unused = take_all(self._unused_caches)
        keys = {uid: cache.key for uid, cache in caches.items()}
        self._send(messages.StartSegment(command, admissions, keys, unused))
        return ended

    def suspend(self, worker: str, uid: str) -> RemoteCache:
        """Raises HostLostError if the host has left."""
        key = next(self._cache_keys)
        self._send(messages.SuspendRow(worker, uid, key))
        cache = RemoteCache(key)
        # The host frees the cache with the next segment after its last user here has gone.
        weakref.finalize(cache, self._unused_caches.append, key).atexit = False
        return cache

    def give_up(self, worker: str) -> None:
        """Lets the host open a failed worker again when it publishes the next weights."""
        self._send_unless_left(messages.GiveUp(worker))

    def send_home(self, row: RolloutSequence) -> None:
        """Sends a finished row to the host, which has submitted it, unless the host has left."""
        self._send_unless_left(messages.RowDone(*without_columns([row])))

    def report_progress(self) -> None:
        self._send_unless_left(messages.Progress())

    def end(self, error: BaseException | None) -> None:
        """Ends the rollout on the host, with the reason if it has failed or was stopped here."""
        is_stop = isinstance(error, StoppedError | GeneratorExit)
        why = None if error is None or is_stop else f"{type(error).__name__}: {error}"
        self._last_end = self._rollout, messages.Ended(is_stop, why)
        self._send_unless_left(self._last_end[1])
        self._fail_segments("the rollout has ended")

    def close(self) -> None:
        self._channel.close()

    def _send(self, message: messages.FromFirstHost) -> None:
        if self.has_left:
            raise HostLostError(f"host {self.host} has left the rollout")
        self._channel.send((self._rollout, message))

    def _send_unless_left(self, message: messages.FromFirstHost) -> None:
        try:
            self._send(message)
        except HostLostError as error:
            log.debug("host %d has left the rollout", self.host, exc_info=error)

    # In the channel's thread -------------------------------------------------------------------------------------

    def _receive(self, received: tuple[int, messages.ToFirstHost]) -> None:
        rollout, message = received
        match message:
            case messages.Joined() if rollout <= self._last_end[0]:
                # It has ended before this host joined.
                with suppress(HostLostError):
                    self._channel.send(self._last_end)
            case messages.Joined() | messages.Submitted():
                self._inbox.put((rollout, message))
                self.on_submitted()
            case messages.Left():
                self._last_left = rollout
                self._last_stopped = rollout if message.is_stop else self._last_stopped
                self._inbox.put((rollout, message))
                self.on_submitted()
                if self.has_left:
                    self._fail_segments(f"host {self.host} has left the rollout")
            case messages.SegmentResult() if rollout == self._rollout:
                self._end_segment(message.worker, message.result)
            case messages.Reopened() if rollout == self._rollout:
                worker = self.workers.pop(message.worker)
                self.workers[worker.next_name] = worker
                worker.is_reopened = True

    def _end_segment(self, worker: str, result: RemoteSegment | str) -> None:
        ended = self._segments.pop(worker, None)
        if isinstance(result, str):
            if ended is None:
                self._failures[worker] = result
            else:
                ended.set_exception(HostWorkerError(result))
        elif ended is not None:
            ended.set_result(result)

    def _lose(self) -> None:
        self._last_left = math.inf
        self._inbox.put(None)
        self.on_submitted()
        self._fail_segments(f"the connection to host {self.host} is lost")

    def _fail_segments(self, why: str) -> None:
        for worker in list(self._segments):
            ended = self._segments.pop(worker, None)
            if ended is not None:
                ended.set_exception(HostLostError(why))


@dataclass(eq=False, kw_only=True)
class HostWorker(RemoteWorker):
    """A worker of another host, which has opened it with its own copy of the weights."""

    peer: PeerHost
    is_reopened: bool = False
    """Whether its host has opened it again after a failure."""
    _segment: Future[RemoteSegment] | None = None

    def reset(self, name: str) -> None:
        """Forgets an earlier rollout; the host has opened the worker under this name."""
        self.name, self.is_reopened = name, False
        self._admissions, self._running, self._segment = {}, None, None

    @property
    def can_open(self) -> bool:
        return self.is_reopened

    def open(self, weights: object, request: object, *, suspends: bool) -> None:
        """Uses a worker that its host has opened again."""
        self.is_reopened = False

    def queue_weights(self, weights: object, *, policy_version: int) -> None:
        """Does nothing, because each host publishes weights to its own workers."""

    def _send_segment(
        self, command: RunSegment, admissions: Sequence[Admission], caches: dict[str, RemoteCache]
    ) -> None:
        self._segment = self.peer.start_segment(command, admissions, caches)

    def _receive_segment(self) -> RemoteSegment:
        assert self._segment is not None
        return self._segment.result()

    def _send_suspend(self, uid: str) -> RemoteCache:
        return self.peer.suspend(self.name, uid)

    def close(self) -> None:
        """Forgets the rows of a failed worker; the host closes it itself."""
        self._admissions, self._running, self._segment = {}, None, None
        self.peer.give_up(self.name)
