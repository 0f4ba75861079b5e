"""Rollout workers in Ray actors: processes on this or other machines, scheduled by this process.

The scheduler, the rows and the log stay in this process. Weights are stored once in Ray's object store for all actors.
A segment sends copies of the rows that it admits, and returns the sampled tokens. The cache of a suspended row is
dropped, and the next worker recomputes it. Source: Moritz et al. 2018 (Ray).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
import warnings
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, ClassVar

import jax
import ray
import ray.exceptions
from ray._private import worker as ray_process

from app.distributed.stop_check import StopCheck, StoppedError
from app.model.decode_weights import DecodeWeights
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.scheduling.protocol import RunSegment, SegmentEnded
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.ray_actor import ActorInfo, ActorSegment, ActorSpec, RolloutActor, to_bit_leaves
from app.rollout.workers.worker import Admission, RolloutWorker, WorkerDiedError
from settings.errors import InputError

CONNECT_TIMEOUT_S = 10.0
START_TIMEOUT_S = 900.0
"""Maximum time for an actor to start and compile: long enough to compile for a TPU."""
POLL_INTERVAL_S = 1.0
"""Interval between checks for a requested stop while actors start."""
RESOURCE_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""Resource -> option of a Ray actor; all other resources are passed in its option `resources`."""

_Actor: Any = ray.remote(RolloutActor)  # pyright: ignore[reportCallIssue, reportArgumentType]


class RayCluster:
    """The connection to the Ray cluster of all actors, opened on first use.

    Args:
        address: `host:port` of a cluster, `auto` for the cluster on this machine, `local` to start one.
        resources: Ray resources that each actor requests.
    """

    def __init__(self, address: str, resources: Sequence[Mapping[str, float]]):
        self._address, self._resources = address, resources
        self._has_connected = False
        self._lock = Lock()
        self._weights: Any = None
        self._source: Callable[[], object] = lambda: None
        self._first_devices: tuple[str, str] | None = None
        """Name and devices of the actor that was ready first."""

    def connect(self) -> None:
        """Connects to the cluster or starts one, unless this process is already connected.

        Raises:
            InputError: the cluster cannot be used.
        """
        if ray.is_initialized():
            return
        # Ray reads this variable when it starts a process.
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        arguments: dict[str, Any] = {
            "address": self._address,
            "runtime_env": {"worker_process_setup_hook": "grpo.add_program_to_path"},
        }
        if self._address == "local":
            total: Counter[str] = Counter()
            for one in self._resources:
                total.update(one)
            # The processes share this machine's cores; Ray only needs a sufficient total.
            num_cpus = max(math.ceil(total["CPU"]), 1)
            others = {name: amount for name, amount in total.items() if name not in RESOURCE_OPTIONS}
            arguments |= {"num_cpus": num_cpus, "resources": others, "include_dashboard": False}
        sigterm_handler = signal.getsignal(signal.SIGTERM)
        with warnings.catch_warnings():
            # JAX warns about forks. These children only execute other programs.
            warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
            try:
                if ":" in self._address:
                    # Ray would wait for minutes if nothing listens there.
                    host, _, port = self._address.rpartition(":")
                    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
                ray.init(**arguments, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
            except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                if self._address == "local":
                    raise InputError(
                        f"rollout.ray.address: cannot start a cluster on this machine: {_first_line(error)}; set it "
                        "to the address of a running cluster, or to null for workers in this process"
                    ) from error
                raise InputError(
                    f"rollout.ray.address: the cluster at {self._address} cannot be used: {_first_line(error)}; start "
                    "one with `ray start --head`, or set this to `local` to let this program start one"
                ) from error
            finally:
                # Ray's SIGTERM handler would end this process, which has its own handler.
                if signal.getsignal(signal.SIGTERM) is not sigterm_handler:
                    signal.signal(signal.SIGTERM, sigterm_handler)
        # Ray reports ended processes on stdout, which is reserved for results. The workers log to stderr.
        ray_process._worker_logs_enabled = False
        self._has_connected = True

    def disconnect(self) -> None:
        """Closes the connection if `connect` opened it, and ends the cluster and its actors if `connect` started it."""
        if self._has_connected:
            ray.shutdown()
            self._has_connected = False

    def check_same_devices(self, actor: str, devices: str) -> None:
        """Raises InputError if an actor's devices differ from the devices of the first actor."""
        first, expected = self._first_devices = self._first_devices or (actor, devices)
        if devices != expected:
            raise InputError(
                f"rollout.mode: `exact` needs the same devices for all actors, but {first} has {expected} and {actor} "
                f"has {devices}; make rollout.ray.fast_resources and rollout.ray.heavy_resources request the same "
                "devices, or set rollout.mode to `fast`"
            )

    def put_weights(self, weights: DecodeWeights) -> Any:
        """Returns a Ray reference to the weights' `BitLeaves`, stored once for all actors. Thread-safe."""
        first = jax.tree.leaves(weights)[0]
        with self._lock:
            # Compared by identity, because evaluations all have version 0.
            if self._source() is not first:
                # The previous weights are freed first, unless an actor still reads them.
                self._weights = None
                self._weights = ray.put(to_bit_leaves(weights))
                self._source = weakref.ref(first)
            return self._weights


@dataclass(eq=False, kw_only=True)
class RayWorker(RolloutWorker):
    """A worker whose slots are in a Ray actor. Its `engine` only describes them and is never opened."""

    spec: ActorSpec
    cluster: RayCluster
    resources: Mapping[str, float]
    """Ray resources that the actor requests."""
    keeps_caches: ClassVar[bool] = False
    info: ActorInfo | None = None
    """Information about the actor, once it has started."""
    _actor: Any = None
    _rows: dict[str, RolloutSequence] = field(default_factory=dict)
    """Maps names to the rows in its slots."""
    _compiled: list[tuple[SamplingRules, bool]] = field(default_factory=list)
    _startup: list[Any] = field(default_factory=list)
    """Unfinished calls of `get_info` and `compile`."""
    _calls: list[Any] = field(default_factory=list)
    """Calls since the last segment; their errors are raised with the segment."""

    @property
    def num_devices(self) -> int:
        """0, because the devices belong to the actor's process."""
        return 0

    def compile(self, rules: SamplingRules, *, suspends: bool) -> None:
        """Starts the actor if necessary, and requests the compilation, without waiting for either."""
        self._start()
        if (rules, suspends) not in self._compiled:
            self._compiled.append((rules, suspends))
            self._startup.append(self._actor.compile.remote(rules, suspends=suspends))

    def _start(self) -> None:
        if self._actor is None:
            self.cluster.connect()
            others = {name: amount for name, amount in self.resources.items() if name not in RESOURCE_OPTIONS}
            options = {"num_cpus": 0, "num_gpus": 0, "resources": others, "max_restarts": 0}
            options |= {RESOURCE_OPTIONS[name]: self.resources[name] for name in self.resources.keys() - others}
            self._actor = _Actor.options(**options).remote(self.spec)
            self._startup.append(self._actor.get_info.remote())

    def wait_until_ready(self, stop_requested: StopCheck) -> None:
        """Waits until the actor has started and compiled; see `RolloutWorker.wait_until_ready`."""
        self._start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while self._startup:
            if stop_requested():
                raise StoppedError
            if time.monotonic() > deadline:
                raise InputError(
                    f"rollout.ray: after {START_TIMEOUT_S:g} s the actor of {self.name} has not started and "
                    f"compiled; it needs {_format_resources(self.resources)}, and the cluster has "
                    f"{_format_resources(ray.available_resources())} left; request less "
                    f"(rollout.ray.{self.kind}_resources), or add machines"
                )
            done, self._startup = ray.wait(self._startup, num_returns=len(self._startup), timeout=POLL_INTERVAL_S)
            try:
                results = self._get(done)
            except InputError:
                raise
            except Exception as error:
                raise InputError(
                    f"rollout.ray: the actor of {self.name}, which needs {_format_resources(self.resources)}, cannot "
                    f"start: {_first_line(error)}; see its log, or set rollout.ray.address to null "
                    "for workers in this process"
                ) from error
            for info in (one for one in results if isinstance(one, ActorInfo)):
                self.info = info
                if self.spec.exact:
                    self.cluster.check_same_devices(self.name, info.devices)

    def open(self, weights: DecodeWeights, request: GenerationRequest, *, suspends: bool) -> None:
        """Sends the weights and the request to the actor, without waiting for their arrival."""
        self._queued_weights.clear()
        self._calls = [self._actor.open.remote(self.cluster.put_weights(weights), request, suspends=suspends)]

    def queue_weights(self, weights: DecodeWeights, *, policy_version: int) -> None:
        """Queues weights for the next segment; see `RolloutWorker.queue_weights`."""
        self._queued_weights.append((self.cluster.put_weights(weights), policy_version))

    def suspend(self, row: RolloutSequence) -> SuspendedSequence:
        """Takes a row out of its slot and drops its KV cache."""
        self._calls.append(self._actor.suspend.remote(row.name))
        del self._rows[row.name]
        return SuspendedSequence(row)

    def start_segment(self, command: RunSegment, admissions: deque[Admission]) -> None:
        """Sends the admitted rows and the command to the actor; see `RolloutWorker.start_segment`."""
        self._started_at = self.clock()
        # The actor keeps no list of ended rows: it frees their blocks when other rows need them.
        self.ended_keys.clear()
        incoming = list(admissions)
        admissions.clear()
        rows = _without_columns(one.row for one in incoming)
        for one in incoming:
            self._rows[one.row.name] = one.row
            # Only now, because the actor counts the prompt tokens of copies whose `started_s` is 0.
            one.row.started_s = one.row.started_s or time.perf_counter()
        sent = [Admission(row, suspended=None) for row in rows]
        new_weights = self._queued_weights.pop() if self._queued_weights else (None, 0)
        self._calls.append(self._actor.run_segment.remote(command, sent, *new_weights))

    def finish_segment(self) -> SegmentEnded:
        """Waits for the segment and adds its tokens to the rows.

        Raises:
            WorkerDiedError: the actor's process has ended.
            Exception: the error raised in the actor.
        """
        assert self._started_at is not None
        calls, self._calls = self._calls, []
        result: ActorSegment = self._get(calls)[-1]
        at = self.clock()
        self._segment_counters.append(result.counters)
        for report in result.ended.rows:
            row, tokens = self._rows[report.uid], result.tokens.get(report.uid)
            row.worker = self.name
            if tokens is None:
                continue
            # A copy, because the array may be in shared memory.
            row.segment_tokens.append(tokens.copy())
            row.prompt_routes = result.prompt_routes.get(report.uid, row.prompt_routes)
            row.segment_versions.append((result.policy_version, tokens.shape[1]))
            row.num_tokens += tokens.shape[1]
            row.num_segments += 1
            if report.finish is not None:
                row.finish(report.finish)
            row.turn_end = report.turn_end
            if report.finish is not None or row.is_acting:
                del self._rows[report.uid]
        return replace(result.ended, at=at, worker=self.name, seconds=at - self._started_at)

    def close(self) -> None:
        """Frees the device memory of the actor, which keeps running."""
        self._rows, self._calls = {}, []
        self._queued_weights.clear()
        if self._actor is not None and not self.is_lost:
            self._actor.close.remote()

    def shut_down(self) -> None:
        """Kills the actor, and disconnects from the cluster."""
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)
        self._actor = None
        self.cluster.disconnect()

    def _get(self, calls: list[Any]) -> list[Any]:
        """Returns the results of remote calls, or raises their first error."""
        try:
            return ray.get(calls)
        except ray.exceptions.RayTaskError as error:
            raise error.cause if isinstance(error.cause, Exception) else RuntimeError(str(error)) from None
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines() or [""]
            # Ray reports an error of the actor's constructor in the last line, all others in the first.
            line = lines[-1] if "creation task" in lines[0] else lines[0]
            message = f"the actor of {self.name} is lost: {type(error).__name__}: {line.rstrip('.')}; see its log"
            raise WorkerDiedError(message) from error


def _without_columns(rows: Iterable[RolloutSequence]) -> list[RolloutSequence]:
    """Returns copies without the prompt fields that slots do not need; samples of a prompt still share one `Prompt`."""
    prompts: dict[int, Any] = {}
    copies = []
    for row in rows:
        if id(row.prompt) not in prompts:
            prompts[id(row.prompt)] = replace(row.prompt, source="", answer=None, extra={})
        copies.append(replace(row, prompt=prompts[id(row.prompt)], opening=None))
    return copies


def _format_resources(resources: Mapping[str, Any]) -> str:
    """Returns resources as text, such as `CPU 1, large_memory 1`."""
    amounts = [f"{name} {amount:g}" for name, amount in resources.items() if amount and not name.startswith("node:")]
    return ", ".join(amounts) or "nothing"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
