"""A rollout worker whose slots are in a Ray actor.

Every wait is limited: an actor that does not answer in time is killed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, NoReturn

import jax
import ray
import ray.exceptions

from app.model.decode_weights import DecodeWeights
from app.rollout.ray_cluster.ray_actor import ActorInfo, ActorSpec, RolloutActor, to_bit_leaves
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.protocol import RunSegment
from app.rollout.workers.remote_worker import RemoteCache, RemoteSegment, RemoteWorker
from app.rollout.workers.worker import Admission

_Actor: Any = ray.remote(RolloutActor)  # pyright: ignore[reportCallIssue, reportArgumentType]


class ActorLostError(RuntimeError):
    """An actor's process has ended, or the actor did not answer in time and was killed."""


class WeightBroadcast:
    """Weights in Ray's object store, stored once for all actors."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._ref: Any = None
        self._source: Callable[[], object] = lambda: None

    def put(self, weights: DecodeWeights) -> Any:
        """Returns a Ray reference to the weights' `BitLeaves`. May be called from any thread."""
        first = jax.tree.leaves(weights)[0]
        with self._lock:
            # Compared by identity, because evaluations all have version 0.
            if self._source() is not first:
                # The previous weights are freed first, unless an actor still reads them.
                self._ref = None
                self._ref = ray.put(to_bit_leaves(weights))
                self._source = weakref.ref(first)
            return self._ref


@dataclass(eq=False, kw_only=True)
class RayWorker(RemoteWorker):
    """Worker with slots in an actor.

    A lost actor is replaced at once. The new actor takes part in the first rollout that starts after it is ready, and
    in an open one once weights are published.
    """

    spec: ActorSpec
    actor_options: Mapping[str, Any]
    """Ray's options for the actor: `num_cpus`, `num_gpus`, `memory` in bytes, `resources`."""
    broadcast: WeightBroadcast
    lease_s: float
    """Maximum duration of a segment."""
    start_timeout_s: float
    """Maximum time to start, to compile or to receive weights."""
    actor_info: ActorInfo | None = None
    """Information about the latest actor that became ready."""
    startup_calls: list[Any] = field(default_factory=list)
    """Unfinished calls of a new actor: `get_info` and compilations."""
    _actor: Any = None
    _compile_requests: list[tuple[SamplingRules, bool]] = field(default_factory=list)
    _opening: Any = None
    _segment: Any = None
    _is_open: bool = False
    _is_lost: bool = False

    def start_actor(self) -> None:
        """Requests an actor from Ray, then its information and compilations, without waiting for any of them."""
        assert self.cache_timeout_s is not None
        self._actor = _Actor.options(**self.actor_options, max_restarts=0).remote(self.spec, self.cache_timeout_s)
        self.startup_calls = [self._actor.get_info.remote()]
        self.startup_calls += [self._actor.compile.remote(rules, suspends=x) for rules, x in self._compile_requests]

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        """Requests the compilation for these rules, unless it was requested before."""
        if (rules, suspends) not in self._compile_requests:
            self._compile_requests.append((rules, suspends))
            self.startup_calls.append(self._actor.compile.remote(rules, suspends=suspends))

    def is_ready(self, *, timeout_s: float) -> bool:
        """Returns whether all startup calls have finished.

        Raises:
            Exception: the error of a startup call.
        """
        if calls := self.startup_calls:
            done, self.startup_calls = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
            for result in map(self._get_result, done):
                self.actor_info = result if isinstance(result, ActorInfo) else self.actor_info
        return not self.startup_calls

    # The interface of a worker -----------------------------------------------------------------------------------

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool) -> None:
        """Sends the weights without waiting for their arrival; the first `start_segment` waits for it.

        Raises:
            ActorLostError: the actor is not ready yet, so it takes no part in this rollout.
        """
        if not self.is_ready(timeout_s=0):
            raise ActorLostError(f"the actor of {self.name} is still starting")
        self._queued_weights.clear()
        self._opening = self._actor.open.remote(self.broadcast.put(weights), request, suspends=suspends)
        self._is_open = True

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Queues weights for the next segment; see `RolloutWorker.queue_weights`."""
        if self._is_open:
            self._queued_weights.append((self.broadcast.put(weights), policy_version))

    def _send_segment(
        self, command: RunSegment, admissions: Sequence[Admission], caches: dict[str, RemoteCache]
    ) -> None:
        if self._opening is not None:
            opening, self._opening = self._opening, None
            self._wait(opening, timeout_s=self.start_timeout_s)
        new_weights = self._queued_weights.pop() if self._queued_weights else (None, 0)
        refs = {uid: cache.key for uid, cache in caches.items()}
        self._segment = self._actor.run_segment.remote(command, admissions, refs, *new_weights)

    def _receive_segment(self) -> RemoteSegment:
        """Waits for the segment until its lease ends.

        Raises:
            ActorLostError: the actor is lost.
            Exception: the error raised in the actor.
        """
        call, self._segment = self._segment, None
        result: RemoteSegment = self._wait(call, timeout_s=self.lease_s)
        # Copies, because the arrays may be in memory shared with other processes of this machine.
        return result._replace(tokens={uid: tokens.copy() for uid, tokens in result.tokens.items()})

    def _send_suspend(self, uid: str) -> RemoteCache:
        # A Ray object that the actor stores later.
        return RemoteCache(self._actor.suspend.remote(uid))

    def close(self) -> None:
        """Frees the actor's devices, or replaces the actor if it is lost."""
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
        """Kills the actor, if one was started."""
        if self._actor is not None:
            ray.kill(self._actor)

    def _wait(self, call: Any, *, timeout_s: float) -> Any:
        if not ray.wait([call], timeout=timeout_s)[0]:
            self._lose_actor(f"silent for {timeout_s:g} s")
        return self._get_result(call)

    def _get_result(self, call: Any) -> Any:
        """Returns the result of a finished call, or raises its error."""
        try:
            return ray.get(call, timeout=self.start_timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            # Ray reports an error of the actor's constructor in the last line, all others in the first.
            line = lines[-1] if "creation task" in lines[0] else lines[0]
            self._lose_actor(f"{type(error).__name__}: {line}", error)

    def _lose_actor(self, why: str, cause: Exception | None = None) -> NoReturn:
        self._is_lost = True
        self.kill_actor()
        raise ActorLostError(f"the actor of {self.name} is lost: {why}") from cause
