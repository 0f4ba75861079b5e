"""A rollout worker: a slot engine that carries out a scheduler's commands and reports the progress of its rows."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from app.mesh.placement import tree_shardings
from app.model.decode_weights import DecodeWeights
from app.rollout.counters import RolloutCounters
from app.rollout.request import GenerationRequest
from app.rollout.scheduling.protocol import RowReport, RunSegment, SegmentEnded, WorkerKind
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.slots.slot_engine import SlotEngine

log = logging.getLogger(__name__)

T = TypeVar("T")
Clock = Callable[[], float]
"""Returns seconds since a fixed moment."""


class Admission(NamedTuple):
    """A row to be admitted to a worker."""

    row: RolloutSequence
    uid: str
    epoch: int
    """Number of its admission, as in `Admit`."""
    suspended: Future[SuspendedSequence] | None
    """Its cache; if None, or if the future fails, the cache is recomputed from the row's tokens."""


@dataclass(eq=False)
class RolloutWorker:
    """Slots controlled by a scheduler. Used by one thread at a time."""

    name: str
    kind: WorkerKind
    engine: SlotEngine
    device: str | None = None
    """Name of the device shared with other workers; None = the worker has its own devices."""
    cache_timeout_s: float | None = None
    """Maximum wait for the cache of a row from another worker; None = no limit."""
    clock: Clock = time.perf_counter
    _admissions: dict[RolloutSequence, Admission] = field(default_factory=dict)
    """Maps rows in its slots to their admissions."""
    _running: tuple[RunSegment, float] | None = None
    """Command and start time of the running segment."""
    _queued_weights: deque[tuple[DecodeWeights, int]] = field(default_factory=lambda: deque(maxlen=1))
    """Newest weights not loaded yet, already on its devices, with their version. Set by another thread."""
    _queueing: Lock = field(default_factory=Lock)
    """Held while weights are queued or taken."""
    ended_keys: deque[str] = field(default_factory=deque)
    """Keys of rows that ended in no slot, whose blocks the next segment frees. Set by another thread."""
    _segment_counters: deque[RolloutCounters] = field(default_factory=deque)
    """Counts of each segment since the last `take_counters`."""

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool) -> None:
        """Puts the weights on the worker's devices and starts with empty slots; see `SlotEngine.open`."""
        self._queued_weights.clear()
        placed = self._place_weights(weights)
        # An update may still be computing the weights, and no lease may be running meanwhile.
        jax.block_until_ready(placed)
        self.engine.open(placed, request, suspends=suspends)

    @property
    def can_open(self) -> bool:
        """Whether `open` may succeed after a failure."""
        return True

    @property
    def next_name(self) -> str:
        """Its name when it joins again after a failure, which tells it from the worker that failed."""
        name, _, number = self.name.partition("#")
        return f"{name}#{int(number or 1) + 1}"

    @property
    def num_devices(self) -> int:
        return len(jax.tree.leaves(self.engine.programs.abstract_weights)[0].sharding.device_set)

    def _place_weights(self, weights: DecodeWeights) -> DecodeWeights:
        return jax.device_put(weights, tree_shardings(self.engine.programs.abstract_weights))

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Queues weights for its next segment; rows keep their caches. May be called from any thread.

        The same thread must pass the weights to all workers: if several threads place an array at once, some of them
        see it before JAX has listed all its shards (jax 0.10.2).
        """
        if self.engine.is_open:
            # So that a device has no third copy, and no segment begins with older weights meanwhile.
            with self._queueing:
                self._queued_weights.clear()
                self._queued_weights.append((self._place_weights(weights), policy_version))
            # If another thread has closed the engine meanwhile, no weights may stay on its devices.
            if not self.engine.is_open:
                self._queued_weights.clear()

    def take_counters(self) -> RolloutCounters:
        """Returns the counts of the segments ended since the last call. May be called from any thread."""
        return RolloutCounters.sum([RolloutCounters(), *take_all(self._segment_counters)])

    def close(self) -> None:
        self._admissions, self._running = {}, None
        self._queued_weights.clear()
        self.ended_keys.clear()
        self.engine.close()

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes a row out of its slot, with its cache."""
        del self._admissions[row]
        return self.engine.suspend([row])[0]

    def start_segment(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Admits rows and dispatches the segment. Empties `admissions`, so that it keeps no caches alive."""
        started = self.clock()
        with self._queueing:
            newer = self._queued_weights.pop() if self._queued_weights else None
        if newer is not None:
            self.engine.load_weights(newer[0], policy_version=newer[1])
            del newer
        for key in take_all(self.ended_keys):
            self.engine.forget(key)
        computed = []
        while admissions:
            one = admissions.popleft()
            self._admissions[one.row] = one._replace(suspended=None)
            # A row that has to wait for blocks must not keep a cache beside them.
            cache = self._fetch_cache(one) if self.engine.has_room(one.row) else None
            if cache is None:
                computed.append(SuspendedSequence(one.row) if one.row.num_tokens else one.row)
            else:
                # One at a time, because all copies together would be as large as all slots.
                self.engine.admit([cache._replace(row=one.row)])
                del cache
        self.engine.admit(computed)
        self.engine.start_segment(
            length=command.length,
            leave_when_finished=command.leave_when_finished,
            leave_when_active=command.leave_when_active,
        )
        self._running = command, started

    def _fetch_cache(self, one: Admission) -> SuspendedSequence | None:
        """Returns a row with its cache on this worker's devices; None = the cache must be recomputed."""
        if one.suspended is None:
            return None
        try:
            suspended = one.suspended.result(self.cache_timeout_s)
        except Exception as error:
            log.warning("rollout worker %s recomputes the cache of %s", self.name, one.uid, exc_info=error)
            return None
        cache, shapes = suspended.cache, self.engine.programs.abstract_row
        if cache is None or jax.tree.map(jnp.shape, cache) != jax.tree.map(jnp.shape, shapes):
            # It waited for blocks, or comes from a device with blocks of another size.
            return None
        return suspended._replace(cache=jax.device_put(cache, tree_shardings(shapes)))

    def finish_segment(self, *, not_before: float = 0.0) -> SegmentEnded:
        """Waits for the segment and collects its tokens.

        Args:
            not_before: earliest possible start of the segment, because another worker used the devices until then.
        """
        assert self._running is not None
        (command, started), self._running = self._running, None
        segment = self.engine.finish_segment()
        # Tokens are collected before the report, because committed tokens must survive a failure of the worker.
        segment.collect()
        self.engine.finish_stopped_rows()
        self._segment_counters.append(self.engine.counters.take())
        at = self.clock()
        reports = []
        for row in [*(one.row for one in segment.decoded), *segment.waited]:
            admission, row.worker = self._admissions[row], self.name
            reports.append(RowReport(*admission[1:3], row.num_tokens, row.finish_reason, row.turn_end))
            if row.finish_reason is not None or row.is_acting:
                del self._admissions[row]
        seconds = at - max(started, not_before)
        return SegmentEnded(at, self.name, command.segment, tuple(reports), seconds, segment.steps)


def take_all(items: deque[T]) -> list[T]:
    """Removes and returns all items; several threads may do so at the same time."""
    taken: list[T] = []
    with suppress(IndexError):
        while True:
            taken.append(items.popleft())
    return taken
