"""A rollout worker: a slot engine that carries out the commands of a scheduler and reports on its rows."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from threading import Lock
from typing import ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from app.distributed.stop_check import StopCheck
from app.mesh.placement import tree_shardings
from app.model.decode_weights import DecodeWeights
from app.rollout.counters import RolloutCounters
from app.rollout.engine.engine import SlotEngine
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.protocol import RowReport, RunSegment, SegmentEnded, WorkerKind
from app.rollout.sequence import RolloutSequence, SuspendedSequence

T = TypeVar("T")


class WorkerDiedError(RuntimeError):
    """The process of a worker has ended."""


class Admission(NamedTuple):
    """A row to be admitted to a worker."""

    row: RolloutSequence
    suspended: Future[SuspendedSequence] | None
    """Future of the row with its KV cache; None = the cache is recomputed from the row's tokens."""


@dataclass(eq=False)
class RolloutWorker:
    """A slot engine under a scheduler. Only one thread at a time may use it, except as noted below."""

    name: str
    kind: WorkerKind
    engine: SlotEngine
    device: str | None = None
    """Name of the device shared with other workers; None = the worker has its own devices."""
    clock: Callable[[], float] = time.perf_counter
    """Returns seconds since a fixed point in time."""
    is_lost: bool = False
    """Whether its process has died; always False for workers in this process."""
    keeps_caches: ClassVar[bool] = True
    """Whether the cache of a suspended row is kept for its next worker."""
    _started_at: float | None = None
    """Start time of its last segment, by `clock`."""
    _queued_weights: deque[tuple[DecodeWeights, int]] = field(default_factory=lambda: deque(maxlen=1))
    """Newest weights, already on its devices but not yet used, and their version. Other threads may set them."""
    _queueing: Lock = field(default_factory=Lock)
    """Lock held while weights are queued or taken."""
    ended_keys: deque[str] = field(default_factory=deque)
    """Keys of rows that ended outside of slots; the next segment frees their blocks. Other threads may add keys."""
    _segment_counters: deque[RolloutCounters] = field(default_factory=deque)
    """Counts of each segment since the last `take_counters`."""

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        """Compiles the programs of rollouts under these rules; a remote worker compiles them in the background."""
        self.engine.compile(rules, suspends=suspends)

    def wait_until_ready(self, stop_requested: StopCheck) -> None:
        """Waits until a remote worker has started and compiled.

        Raises:
            InputError: the worker cannot start.
            StoppedError: a stop was requested in the meantime.
        """

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool) -> None:
        """Puts the weights on the worker's devices and starts with empty slots; see `SlotEngine.open`."""
        self._queued_weights.clear()
        placed = self._place_weights(weights)
        # An update may still be computing the weights, which must not delay a segment.
        jax.block_until_ready(placed)
        self.engine.open(placed, request, suspends=suspends)

    @property
    def num_devices(self) -> int:
        return len(jax.tree.leaves(self.engine.programs.abstract_weights)[0].sharding.device_set)

    def _place_weights(self, weights: DecodeWeights) -> DecodeWeights:
        return jax.device_put(weights, tree_shardings(self.engine.programs.abstract_weights))

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Queues weights for its next segment; rows keep their caches. May be called from any thread.

        The same thread must pass the weights to all workers: if several threads place an array at once, some see it
        before JAX has listed all its shards (jax 0.10.2).
        """
        # Under the lock, so that a device never has three copies of the weights, and no segment starts with old ones.
        with self._queueing:
            self._queued_weights.clear()
            self._queued_weights.append((self._place_weights(weights), policy_version))

    def take_counters(self) -> RolloutCounters:
        """Returns the counts of the segments that ended since the last call. Only one thread at a time may call it."""
        return RolloutCounters.sum([RolloutCounters(), *take_all(self._segment_counters)])

    def close(self) -> None:
        self._queued_weights.clear()
        self.ended_keys.clear()
        self.engine.close()

    def shut_down(self) -> None:
        """Ends the processes that this worker started, if any. No rollout may follow."""

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes a row out of its slot, and returns it with its KV cache."""
        return self.engine.suspend(row)

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
            # A row that waits for blocks must not keep a separate cache.
            cache = self._fetch_cache(one) if self.engine.scheduler.has_room(one.row) else None
            if cache is None:
                computed.append(one.row)
            else:
                # One at a time, because all copies together could be as large as all slots.
                self.engine.admit([cache._replace(row=one.row)])
                del cache
        self.engine.admit(computed)
        self.engine.start_segment(command.limits)
        self._started_at = started

    def _fetch_cache(self, one: Admission) -> SuspendedSequence | None:
        """Copies a suspended row's cache to the devices of this worker; None = it must be recomputed."""
        if one.suspended is None:
            return None
        suspended = one.suspended.result()
        cache, shapes = suspended.cache, self.engine.programs.abstract_row
        if cache is None or jax.tree.map(jnp.shape, cache) != jax.tree.map(jnp.shape, shapes):
            # The row had no cache because it waited for blocks, or its cache has another block size.
            return None
        return suspended._replace(cache=jax.device_put(cache, tree_shardings(shapes)))

    def finish_segment(self) -> SegmentEnded:
        """Waits for the segment and collects its tokens."""
        assert self._started_at is not None
        segment = self.engine.finish_segment()
        segment.collect()
        self.engine.finish_stopped_rows()
        self._segment_counters.append(self.engine.counters.take())
        at = self.clock()
        reports = []
        for row in [*(one.row for one in segment.decoded), *segment.waited]:
            row.worker = self.name
            reports.append(RowReport(row.name, row.num_tokens, row.finish_reason, row.turn_end))
        return SegmentEnded(at, self.name, tuple(reports), at - self._started_at, segment.steps)


def take_all(items: deque[T]) -> list[T]:
    """Removes and returns all items; other threads may append, but not remove."""
    return [items.popleft() for _ in range(len(items))]
