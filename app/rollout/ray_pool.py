"""Workers as Ray actors: processes of their own, here or on other machines, under the scheduler of this process.

Everything that decides stays here: scheduler, rows and log. Weights go into Ray's object store once for all actors;
the caches of suspended rows stay there, on the machine that they ran on, until an actor fetches them.
Source: Moritz et al. 2018 (Ray).
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import ray
import ray.exceptions
from ray._private import worker as ray_process

from app.distributed.cancellation import StoppedError
from app.records.versions import program_versions, sampling_packages
from app.rollout.ray_worker import RayWorker
from app.rollout.sampling import SamplingRules
from app.rollout.worker_pool import RolloutWorkerPool, ScheduleConfig
from settings.errors import InputError

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 1.0
"""Between looks at whether to stop, while actors start."""
MIN_CPUS = 1
"""Of a cluster of our own."""


class RayWorkerPool(RolloutWorkerPool):
    """Workers in actors. Nothing starts before it is needed; what was started ends with `shut_down`.

    Args:
        workers: that were not hired yet.
        address: of a cluster, `auto` for the one that this machine belongs to; None: one of our own, on this machine.
        start_timeout_s: for all of them to be there.
    """

    def __init__(
        self,
        workers: Sequence[RayWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: Callable[[Sequence[int]], str],
        address: str | None,
        start_timeout_s: float,
        **clock: Any,
    ):
        super().__init__(workers, schedule, decode_text=decode_text, **clock)
        self.ray_workers = tuple(workers)
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._has_started = self._has_connected = False

    def start(self) -> None:
        """Finds or starts the cluster, and waits for all actors.

        Raises:
            InputError: no cluster, not enough of what the actors need, or processes that would not draw alike.
            StoppedError: asked to stop meanwhile.
        """
        if self._has_started:
            return
        try:
            if not ray.is_initialized():
                _connect(self._address, [worker.actor_options for worker in self.ray_workers])
                self._has_connected = True
            for worker in self.ray_workers:
                worker.start_actor()
            self._wait_for_all("started")
            self._check_same_environment()
        except BaseException:
            self.shut_down()
            raise
        self._has_started = True

    def compile(self, rules: SamplingRules) -> None:
        """See `Streaming`: all actors at once."""
        self.start()
        for worker in self.ray_workers:
            worker.compile(rules, suspends=self._suspends)
        self._wait_for_all("compiled")

    def _available_workers(self) -> list[Any]:
        self.start()
        return super()._available_workers()

    def _wait_for_all(self, action: str) -> None:
        until, late = time.monotonic() + self._start_timeout_s, list(self.ray_workers)
        while late and time.monotonic() < until:
            if self.stop_requested():
                raise StoppedError
            look = min(time.monotonic() + POLL_INTERVAL_S, until)
            late = [worker for worker in late if not _is_ready(worker, look)]
        if late:
            raise InputError(
                f"rollout.ray.start_timeout_s: after {self._start_timeout_s:g} s {len(late)} of "
                f"{len(self.ray_workers)} "
                f"actors have not {action}; {late[0].name} needs {_format_resources(late[0].actor_options)}, and what "
                f"the cluster has left "
                f"is {_format_resources(ray.available_resources())}; ask for less (rollout.ray.{late[0].kind}), add "
                f"machines, or "
                "wait for longer"
            )

    def _check_same_environment(self) -> None:
        """Whether all processes run the same program and packages, and in the exact mode on the same devices."""
        here = program_versions(sampling_packages(self.ray_workers[0].spec.quantization))
        found = {worker.name: worker.actor_info for worker in self.ray_workers if worker.actor_info is not None}
        for name, who in found.items():
            for fact, value in who.facts.items():
                if value != here[fact]:
                    raise InputError(
                        f"rollout.pool: {fact} is {value} where {name} runs ({who.host}) and {here[fact]} here; "
                        "install the same on all machines"
                    )
        devices = Counter(who.devices for who in found.values())
        if self.ray_workers[0].engine.exact and len(devices) > 1:
            told = ", ".join(f"{name} {who.devices}" for name, who in found.items())
            raise InputError(
                f"rollout.mode: exact samples need actors with as many devices of one kind each, got {told}; make "
                "rollout.ray.fast and rollout.ray.heavy ask for the same, or set rollout.mode: fast"
            )

    def shut_down(self) -> None:
        """Ends the actors, and the cluster where it is ours."""
        if not ray.is_initialized():
            return
        for worker in self.ray_workers:
            worker.kill_actor()
        if self._has_connected:
            ray.shutdown()
            self._has_connected = False
        self._has_started = False


def _is_ready(worker: RayWorker, deadline: float) -> bool:
    try:
        return worker.is_ready(timeout_s=max(deadline - time.monotonic(), 0))
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"rollout.pool: the actor of {worker.name}, which needs {_format_resources(worker.actor_options)}, cannot "
            f"start: "
            f"{_first_line(error)}"
        ) from error


def _connect(address: str | None, actor_options: Sequence[Mapping[str, Any]]) -> None:
    """Makes this process the driver of a cluster: of its own, as large as is asked for, or of one that is there."""
    # Read once, when Ray starts something.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    arguments: dict[str, Any] = {
        "address": "local" if address is None else address,
        "runtime_env": {"worker_process_setup_hook": "grpo.add_program_to_path"},
    }
    if address is None:
        wanted: Counter[str] = Counter()
        for one in actor_options:
            wanted.update(one["resources"])
        # Processes of one machine share its cores; these numbers only have to add up.
        num_cpus = max(math.ceil(sum(one["num_cpus"] for one in actor_options)), MIN_CPUS)
        arguments |= {"num_cpus": num_cpus, "resources": dict(wanted), "include_dashboard": False}
    with _keep_sigterm_handler(), warnings.catch_warnings():
        # JAX warns of forks. These children do nothing of this process before they become other programs.
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        try:
            if address is not None and ":" in address:
                _check_reachable(address)
            ray.init(**arguments, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            where = "a cluster on this machine" if address is None else f"the cluster at {address}"
            raise InputError(
                f"rollout.ray.address: {where} cannot be used: {_first_line(error)}; `ray start --head` starts one, "
                "and null has this program start one of its own"
            ) from error
    # It would tell on stdout of every process that ends, where only results belong; the workers tell on stderr.
    ray_process._worker_logs_enabled = False


def _check_reachable(address: str) -> None:
    """Raises OSError where nobody listens, for which Ray would wait for minutes."""
    host, _, port = address.rpartition(":")
    socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()


@contextmanager
def _keep_sigterm_handler() -> Iterator[None]:
    """Ray ends a process at SIGTERM; here that is for others to say."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is not before:
            signal.signal(signal.SIGTERM, before)


def _format_resources(resources: Mapping[str, Any]) -> str:
    """`num_cpus 1, large_memory 1`."""
    flat = {**{k: v for k, v in resources.items() if k != "resources"}, **resources.get("resources", {})}
    amounts = [f"{name} {amount:g}" for name, amount in flat.items() if amount and not name.startswith("node:")]
    return ", ".join(amounts) or "nothing"


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
