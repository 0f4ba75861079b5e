"""A worker whose slots are those of a Ray actor: what it is told goes there, what it has drawn comes back.

No wait is without an end: a call that is not answered in time ends the actor, as its machine might have.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, NoReturn, cast

import jax
import numpy as np
import ray
import ray.exceptions

from app.model.kv_cache import DecodeWeights, KVCache
from app.rollout.ray_actor import ActorAdmission, ActorInfo, ActorSegmentResult, ActorSpec, RolloutActor, to_bit_leaves
from app.rollout.sampling import SamplingRules
from app.rollout.scheduling.events import RowReport, RunSegment, SegmentEnded
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers import Admission, RolloutWorker

log = logging.getLogger(__name__)

_Actor: Any = ray.remote(concurrency_groups={"watch": 1})(RolloutActor)  # pyright: ignore[reportCallIssue, reportArgumentType]

POLLS_PER_LEASE = 4
"""How often a lease is looked after while it runs."""


class ActorLostError(RuntimeError):
    """An actor whose process has ended, or that is silent and was ended for it."""


class WeightBroadcast:
    """Weights in Ray's object store: put there once, however many actors take them."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ref: Any = None
        self._source: Callable[[], object] = lambda: None

    def put(self, weights: DecodeWeights) -> Any:
        """The object with their `Leaves`. From any thread."""
        first = jax.tree.leaves(weights)[0]
        with self._lock:
            # Not by their version: evaluations do not name one.
            if self._source() is not first:
                # The old ones make room, unless somebody still takes them.
                self._ref = None
                self._ref = ray.put(to_bit_leaves(weights))
                self._source = weakref.ref(first)
            return self._ref


@dataclass(eq=False, kw_only=True)
class RayWorker(RolloutWorker):
    """Slots in an actor. `engine` says what they are like and is never opened.

    An actor that is gone is replaced at once; the new one takes part in the next rollout that finds it ready.
    """

    spec: ActorSpec
    actor_options: Mapping[str, Any]
    """Options of the actor: `num_cpus`, `num_gpus`, `memory` in bytes, `resources`."""
    broadcast: WeightBroadcast
    lease_s: float
    """How long it may be silent in a segment."""
    start_timeout_s: float
    """How long it may be silent while it compiles or takes weights."""
    actor_info: ActorInfo | None = None
    """Of the newest actor that was ready."""
    _actor: Any = None
    _startup_calls: list[Any] = field(default_factory=list)
    """An introduction and compilations, until all are known to be done."""
    _compile_requests: list[tuple[SamplingRules, bool]] = field(default_factory=list)
    _opening: Any = None
    _segment: Any = None
    _is_open: bool = False
    _is_lost: bool = False

    @property
    def num_devices(self) -> int:
        """Of this process, whose programs they might wait for: none."""
        return 0

    def start_actor(self) -> None:
        """Asks Ray for an actor, and that for all it has to do before it is ready. Waits for nothing."""
        assert self.cache_timeout_s is not None
        self._actor = _Actor.options(**self.actor_options, max_restarts=0).remote(self.spec, self.cache_timeout_s)
        self._startup_calls = [self._actor.get_info.remote()]
        self._startup_calls += [self._request_compile(*one) for one in self._compile_requests]

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        """Asks for it."""
        if (rules, suspends) not in self._compile_requests:
            self._compile_requests.append((rules, suspends))
            self._startup_calls.append(self._request_compile(rules, suspends))

    def _request_compile(self, rules: SamplingRules, suspends: bool) -> Any:
        return self._actor.compile.remote(rules, suspends=suspends)

    def is_ready(self, *, timeout_s: float) -> bool:
        """Whether it has done all that it was asked for before its first rollout.

        Raises:
            Exception: what it has failed with.
        """
        calls = self._startup_calls
        done, waiting = ray.wait(calls, num_returns=len(calls), timeout=timeout_s) if calls else ([], [])
        for call in done:
            said = self._get_result(call)
            self.actor_info = said if isinstance(said, ActorInfo) else self.actor_info
        self._startup_calls = waiting
        return not waiting

    # What a driver asks of a worker ------------------------------------------------------------------------------

    def open(
        self, weights: DecodeWeights, *, rules: SamplingRules, seed: int, policy_version: int, suspends: bool
    ) -> None:
        """Sends the weights. That they have come is waited for before the first segment, by all actors at once.

        Raises:
            RuntimeError: it is not ready; it has no part in this rollout.
        """
        if not self.is_ready(timeout_s=0):
            raise ActorLostError(f"the actor of {self.name} is still starting")
        self._queued_weights.clear()
        self._opening = self._actor.open.remote(
            self.broadcast.put(weights), rules=rules, seed=seed, policy_version=policy_version, suspends=suspends
        )
        self._is_open = True

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """See `Worker.offer`."""
        if self._is_open:
            self._queued_weights.append((self.broadcast.put(weights), policy_version))

    def start_segment(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Sends the rows; see `Worker.begin`."""
        started = self.clock()
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._wait(opening, timeout_s=self.start_timeout_s)
        incoming = []
        while admissions:
            one = admissions.popleft()
            kept = self._cache_ref(one)
            incoming.append(ActorAdmission(one.uid, one.epoch, _without_text(one.row), kept))
            one.row.started_s = one.row.started_s or time.perf_counter()
            self._admissions[one.row] = one._replace(suspended=None)
        newer, version = self._queued_weights.pop() if self._queued_weights else (None, 0)
        self._segment = self._actor.run_segment.remote(command, incoming, newer, version)
        self._running = command, started

    def _cache_ref(self, one: Admission) -> tuple[Any, ...]:
        try:
            return (
                ()
                if one.suspended is None
                else cast("tuple[Any, ...]", one.suspended.result(self.cache_timeout_s).cache)
            )
        except Exception as error:
            log.warning("rollout worker %s computes the cache of %s anew", self.name, one.uid, exc_info=error)
            return ()

    def finish_segment(self, *, not_before: float = 0.0) -> SegmentEnded:
        """Waits for the segment, no longer than its lease; see `Worker.end`.

        Raises:
            GoneError: the actor is gone.
            Exception: what it has failed with.
        """
        assert self._running is not None
        (command, started), self._running = self._running, None
        call, self._segment = self._segment, None
        ran: ActorSegmentResult = self._wait(call, timeout_s=self.lease_s)
        at = self.clock()
        self._segment_counters.append(ran.counters)
        by_uid = {admission.uid: row for row, admission in self._admissions.items()}
        reports = []
        for uid, tokens, finish in ran.rows:
            row = by_uid[uid]
            _append_tokens(row, tokens, ran.policy_version, finish)
            row.worker = self.name
            reports.append(RowReport(uid, self._admissions[row].epoch, row.num_tokens, finish))
            if finish is not None:
                del self._admissions[row]
        seconds = at - max(started, not_before)
        return SegmentEnded(at, self.name, command.segment, tuple(reports), seconds, ran.steps)

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes it out. Its cache is an object of Ray's, there as soon as the actor has put it there."""
        kept = self._actor.suspend.remote(self._admissions.pop(row).uid)
        return SuspendedSequence(row, cast(KVCache, (kept,)))

    def close(self) -> None:
        """Frees the actor's devices, or replaces it where it is gone."""
        self._admissions, self._running = {}, None
        self._queued_weights.clear()
        self._opening = self._segment = None
        self._is_open = False
        if self._is_lost:
            self._is_lost = False
            self.start_actor()
        elif self._actor is not None:
            self._actor.close.remote()

    def kill_actor(self) -> None:
        """Ends the actor, whatever it does."""
        if self._actor is not None:
            ray.kill(self._actor)

    def _wait(self, call: Any, *, timeout_s: float) -> Any:
        """What a call gives, or what it has failed with; tokens that are computed again renew the time."""
        until, known = time.monotonic() + timeout_s, None
        while not ray.wait([call], timeout=min(timeout_s / POLLS_PER_LEASE, max(until - time.monotonic(), 0)))[0]:
            fed = self._num_replayed(timeout_s / POLLS_PER_LEASE)
            if known is not None and fed is not None and fed > known:
                until = time.monotonic() + timeout_s
            elif time.monotonic() >= until:
                self._kill_and_raise(f"silent for {timeout_s:g} s")
            known = known if fed is None else fed
        return self._get_result(call)

    def _num_replayed(self, timeout_s: float) -> int | None:
        try:
            return ray.get(self._actor.num_replayed.remote(), timeout=timeout_s)
        except ray.exceptions.RayError:
            return None

    def _kill_and_raise(self, why: str, cause: Exception | None = None) -> NoReturn:
        self._is_lost = True
        ray.kill(self._actor)
        raise ActorLostError(f"the actor of {self.name} is gone: {why}") from cause

    def _get_result(self, call: Any) -> Any:
        """Of a call that has ended."""
        try:
            return ray.get(call, timeout=self.start_timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None
        except ray.exceptions.RayError as error:
            self._kill_and_raise(f"{type(error).__name__}: {_summary_line(error)}", error)


def _without_text(row: RolloutSequence) -> RolloutSequence:
    """With what its slots read of its prompt."""
    return replace(row, prompt=replace(row.prompt, source="", answer=None, extra={}))


def _append_tokens(row: RolloutSequence, tokens: np.ndarray, version: int, finish: str | None) -> None:
    """What a segment has drawn of a row."""
    # A copy: the buffer may be one that all of the machine's processes share.
    row.segment_tokens.append(tokens.copy())
    row.segment_versions.append((version, tokens.shape[1]))
    row.num_tokens += tokens.shape[1]
    row.num_segments += 1
    if finish is not None:
        row.finish_reason, row.elapsed_s = finish, time.perf_counter() - row.started_s


def _summary_line(error: Exception) -> str:
    """One line of many: what was raised while the actor was made, which Ray tells last, or what Ray says first."""
    lines = str(error).strip().splitlines() or [""]
    return lines[-1] if "creation task" in lines[0] else lines[0]
