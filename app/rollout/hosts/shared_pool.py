"""Workers of several hosts under one scheduler.

Host 0 runs the scheduler and drives the workers of all hosts; the others let it drive theirs, and receive their own
samples. All hosts call the same methods in the same order, each with its own rows, as for workers of one host. Weights
stay on their hosts, and so do the caches of suspended rows: on another host they are computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

from app.distributed.control_channel import ControlChannel, HostLostError
from app.distributed.stop_check import StoppedError
from app.model.decode_weights import DecodeWeights
from app.rollout.counters import RolloutCounters
from app.rollout.hosts.host_messages import FromFirstHost, Left
from app.rollout.hosts.peer_host import PeerHost
from app.rollout.hosts.worker_service import WorkerService
from app.rollout.request import GenerationRequest
from app.rollout.scheduling.protocol import EventRecord, WorkerKind
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.sequence import RolloutSequence
from app.rollout.slots.slot_engine import SlotEngine
from app.rollout.stop_strings import DecodeText
from app.rollout.workers.scheduler_loop import RolloutExecutor, name_rows
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_drivers import ThreadedDriver
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig

PROGRESS_INTERVAL_S = 1.0
"""Minimum time between two reports of progress to the other hosts."""


class SchedulingPool(RolloutWorkerPool):
    """The pool of host 0, whose scheduler uses the workers of all hosts.

    Rows are submitted host by host, which is the order in which a step's prompts are assigned to hosts. If a host
    leaves or is lost, the scheduler goes on without its workers. With `ScheduleConfig.single_thread`, the same
    samples give the same schedule, and a slow host is waited for.
    """

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: DecodeText,
        channels: Sequence[ControlChannel],
    ):
        super().__init__(workers, schedule, decode_text=decode_text)
        self.peers = [PeerHost(channel) for channel in channels]
        """The other hosts, in their order."""
        self._num_rollouts = 0
        self._progress_due_s = 0.0

    @property
    def _suspends(self) -> bool:
        return True

    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        self.records = []
        scheduler = self.make_scheduler(self.learned_lengths.prompts)
        with self.open_executor(weights, scheduler, request, on_record=self.records.append) as run:
            del weights
            self.check_fits(rows)
            of_others = (peer.wait_for_rows(self._is_stopped) for peer in self.peers)
            for row in run.run_in_order(name_rows(chain(rows, *of_others))):
                if row.home[0] == 0:
                    yield row
            self._record_results(run, request)

    @contextmanager
    def open_executor(
        self,
        weights: DecodeWeights,
        scheduler: Scheduler,
        request: GenerationRequest,
        *,
        on_record: Callable[[EventRecord], None],
    ) -> Iterator[RolloutExecutor]:
        """Opens a rollout on the workers of all hosts, and ends it on all of them; see `RolloutWorkerPool`.

        Samples of other hosts are sent there when they are done; `on_sample_done` is called with the others.
        """
        with self._shared_rollout() as remote_workers:
            opened = super().open_executor(
                *(weights, scheduler, request),
                on_record=on_record,
                on_sample_done=self._deliver,
                remote_workers=remote_workers,
            )
            del weights
            with opened as run:
                yield run

    @contextmanager
    def _shared_rollout(self) -> Iterator[list[RolloutWorker]]:
        """Waits for the workers of all other hosts, and ends the rollout there afterwards."""
        self._num_rollouts += 1
        engines: dict[WorkerKind, SlotEngine] = {worker.kind: worker.engine for worker in self.workers}
        for peer in self.peers:
            peer.begin(self._num_rollouts)
        try:
            yield [worker for peer in self.peers for worker in peer.wait_for_workers(engines, self._is_stopped)]
        except BaseException as error:
            self.end_on_other_hosts(error)
            raise
        self.end_on_other_hosts()

    def end_on_other_hosts(self, error: BaseException | None = None) -> None:
        """Ends the rollout on the other hosts, with the error that has ended it here, if any."""
        for peer in self.peers:
            peer.end(error)

    def _deliver(self, row: RolloutSequence) -> None:
        """Passes a finished row on to its host."""
        host, _ = row.home
        if host:
            next(peer for peer in self.peers if peer.host == host).send_home(row)
        elif self.on_sample_done is not None:
            self.on_sample_done(row)

    def _report_progress(self, samples: SampleTable) -> None:
        super()._report_progress(samples)
        if time.monotonic() >= self._progress_due_s:
            self._progress_due_s = time.monotonic() + PROGRESS_INTERVAL_S
            for peer in self.peers:
                peer.report_progress()

    def _is_stopped(self) -> bool:
        return self.stop_requested() or any(peer.has_stopped for peer in self.peers)

    def take_counters(self) -> RolloutCounters:
        """Returns the counts of the workers of all hosts since the last call."""
        workers = [worker for peer in self.peers for worker in peer.workers.values()]
        return RolloutCounters.sum([super().take_counters(), *(worker.take_counters() for worker in workers)])

    def shut_down(self) -> None:
        for peer in self.peers:
            peer.close()


class ServingPool(RolloutWorkerPool):
    """The pool of another host than host 0. It has no schedule of its own, so it records neither events nor metrics.

    `on_progress` is called with an empty table whenever the rollout makes progress on any host.
    """

    def __init__(
        self,
        workers: Sequence[RolloutWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: DecodeText,
        channel: ControlChannel,
    ):
        super().__init__(workers, schedule, decode_text=decode_text)
        self._channel = channel
        self._num_rollouts = 0
        self._service: WorkerService | None = None
        channel.start(self._receive, self._lose)

    @property
    def _suspends(self) -> bool:
        return True

    def _run_in_order(
        self, weights: DecodeWeights, rows: deque[RolloutSequence], request: GenerationRequest
    ) -> Generator[RolloutSequence, None, None]:
        with self.open_service(weights, request) as service:
            del weights
            self.check_fits(rows)
            for number in service.submit(rows):
                yield service.wait_for_row(number)
            service.wait_for_end()

    @contextmanager
    def open_service(self, weights: DecodeWeights, request: GenerationRequest) -> Iterator[WorkerService]:
        """Opens the workers of this host and joins the next rollout; leaves it early if the block raises."""
        self._num_rollouts += 1
        try:
            with self._leaving_on_error():
                awake = self._available_workers()
                driver = ThreadedDriver(awake, lease_s=None)
                with self._opened_workers(awake, driver, weights, request) as opened:
                    del weights
                    self._service = WorkerService(
                        *(self._channel, driver, opened),
                        rollout=self._num_rollouts,
                        reopen=self._reopener(request),
                        stop_requested=self.stop_requested,
                        on_sample_done=self.on_sample_done,
                        on_progress=lambda: self._report_progress(SampleTable()),
                    )
                    # Before the workers are closed, which waits for their segments.
                    with self._leaving_on_error():
                        self._service.join()
                        yield self._service
                    if self._service.has_ended:
                        # Host 0 has waited for all segments except those of workers that it has given up.
                        driver.abandon_running()
                    else:
                        self._leave(is_stop=True)
        finally:
            if self._service is not None:
                self._service.close()
            self._service = None

    @contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._leave(is_stop=isinstance(error, StoppedError))
            raise

    def _leave(self, *, is_stop: bool) -> None:
        with suppress(HostLostError):
            self._channel.send((self._num_rollouts, Left(is_stop)))

    def _receive(self, received: tuple[int, FromFirstHost]) -> None:
        (rollout, message), service = received, self._service
        if service is not None and rollout == service.rollout:
            service.receive(message)

    def _lose(self) -> None:
        service = self._service
        if service is not None:
            service.lose()

    def shut_down(self) -> None:
        self._channel.close()


def share_workers(
    workers: Sequence[RolloutWorker],
    schedule: ScheduleConfig,
    *,
    decode_text: DecodeText,
    channels: Sequence[ControlChannel],
) -> RolloutWorkerPool:
    """Returns this host's pool of the workers of all hosts, of which `workers` are this host's."""
    if channels[0].host == 0:
        return ServingPool(workers, schedule, decode_text=decode_text, channel=channels[0])
    return SchedulingPool(workers, schedule, decode_text=decode_text, channels=channels)
