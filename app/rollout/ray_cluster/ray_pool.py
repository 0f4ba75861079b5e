"""Rollout workers in Ray actors: processes on this or other machines, scheduled by this process.

The scheduler, the rows and the log stay in this process. Weights are stored once in Ray's object store for all actors.
Caches of suspended rows are stored on the machine of their actor until another actor fetches them.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
import ray.exceptions
from ray._private import worker as ray_process

from app.distributed.stop_check import StoppedError
from app.records.versions import program_versions, sampling_packages
from app.rollout.ray_cluster.ray_worker_client import RayWorker
from app.rollout.sampling.token_sampling import SamplingRules
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from settings.errors import InputError

CONNECT_TIMEOUT_S = 10.0
POLL_INTERVAL_S = 1.0
"""Time between two checks for a requested stop while actors start."""


class RayWorkerPool(RolloutWorkerPool):
    """Workers in Ray actors, which start when they are first needed and end with `shut_down`.

    Args:
        address: address of a cluster, `auto` for the one running on this machine, None to start one on this machine.
        start_timeout_s: maximum time until all actors are ready.
    """

    def __init__(
        self,
        workers: Sequence[RayWorker],
        schedule: ScheduleConfig,
        *,
        decode_text: Callable[[Sequence[int]], str],
        address: str | None,
        start_timeout_s: float,
    ):
        super().__init__(workers, schedule, decode_text=decode_text)
        self.ray_workers = tuple(workers)
        self._address = address
        self._start_timeout_s = start_timeout_s
        self._has_started = self._has_connected = False

    def start(self) -> None:
        """Connects to the cluster or starts one, and waits for all actors.

        Raises:
            InputError: the cluster cannot be reached or lacks resources, or the actors would draw different samples.
            StoppedError: a stop was requested while the actors were starting.
        """
        if self._has_started:
            return
        try:
            if not ray.is_initialized():
                connect(self._address, [worker.actor_options for worker in self.ray_workers])
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
        """Compiles the programs of all actors in parallel."""
        self.start()
        for worker in self.ray_workers:
            worker.compile(rules, suspends=self._suspends)
        self._wait_for_all("compiled")

    def _available_workers(self) -> list[Any]:
        self.start()
        return super()._available_workers()

    def _wait_for_all(self, action: str) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while late := [worker for worker in self.ray_workers if not _is_ready(worker)]:
            if self.stop_requested():
                raise StoppedError
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise InputError(
                    f"rollout.ray.start_timeout_s: after {self._start_timeout_s:g} s {len(late)} of "
                    f"{len(self.ray_workers)} actors have not {action}; {late[0].name} needs "
                    f"{_format_resources(late[0].actor_options)}, and the cluster has "
                    f"{_format_resources(ray.available_resources())} left; request less (rollout.ray.{late[0].kind}), "
                    "add machines, or raise rollout.ray.start_timeout_s"
                )
            calls = [call for worker in late for call in worker.startup_calls]
            ray.wait(calls, timeout=min(POLL_INTERVAL_S, left_s))

    def _check_same_environment(self) -> None:
        """Raises InputError if versions differ between processes or, in the exact mode, devices between actors."""
        here = program_versions(sampling_packages(self.ray_workers[0].spec.quantization))
        actors = {worker.name: worker.actor_info for worker in self.ray_workers if worker.actor_info is not None}
        for name, info in actors.items():
            for what, value in info.versions.items():
                if value != here[what]:
                    raise InputError(
                        f"rollout.pool: {what} is {value} for {name} on {info.host} and {here[what]} on this machine; "
                        "install the same version on all machines"
                    )
        if self.ray_workers[0].spec.exact and len({info.devices for info in actors.values()}) > 1:
            devices = ", ".join(f"{name} {info.devices}" for name, info in actors.items())
            raise InputError(
                f"rollout.mode: exact samples need actors with the same number and kind of devices, got {devices}; "
                "make rollout.ray.fast and rollout.ray.heavy request the same devices, or set rollout.mode: fast"
            )

    def shut_down(self) -> None:
        """Kills the actors, and disconnects from the cluster (or ends it) if `start` connected to it."""
        if not ray.is_initialized():
            return
        for worker in self.ray_workers:
            worker.kill_actor()
        if self._has_connected:
            ray.shutdown()
        self._has_started = self._has_connected = False


def _is_ready(worker: RayWorker) -> bool:
    try:
        return worker.is_ready(timeout_s=0)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"rollout.pool: the actor of {worker.name}, which needs {_format_resources(worker.actor_options)}, cannot "
            f"start: {_first_line(error)}"
        ) from error


def connect(address: str | None, actor_options: Sequence[Mapping[str, Any]]) -> None:
    """Makes this process the driver of an existing cluster, or of a new one with resources for all actors.

    Raises:
        InputError: the cluster cannot be used.
    """
    # Ray reads this variable when it starts a process.
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    arguments: dict[str, Any] = {
        "address": address or "local",
        "runtime_env": {"worker_process_setup_hook": "grpo.add_program_to_path"},
    }
    if address is None:
        resources: Counter[str] = Counter()
        for options in actor_options:
            resources.update(options["resources"])
        # The processes share this machine's cores; Ray only needs a large enough total.
        num_cpus = max(math.ceil(sum(options["num_cpus"] for options in actor_options)), 1)
        arguments |= {"num_cpus": num_cpus, "resources": dict(resources), "include_dashboard": False}
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    with warnings.catch_warnings():
        # JAX warns about forks. The children here do nothing before they execute other programs.
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        try:
            if address is not None and ":" in address:
                # Ray would wait for minutes if nothing listened there.
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S).close()
            ray.init(**arguments, log_to_driver=False, configure_logging=False, logging_level=logging.ERROR)
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            if address is None:
                raise InputError(f"rollout.ray: no cluster starts on this machine: {_first_line(error)}") from error
            raise InputError(
                f"rollout.ray.address: the cluster at {address} cannot be used: {_first_line(error)}; start one with "
                "`ray start --head`, or set this to null to let this program start one"
            ) from error
        finally:
            # Ray's SIGTERM handler would end this process, which has its own handler.
            if signal.getsignal(signal.SIGTERM) is not sigterm_handler:
                signal.signal(signal.SIGTERM, sigterm_handler)
    # Ray reports ended processes on stdout, which is reserved for results. The workers log to stderr.
    ray_process._worker_logs_enabled = False


def _format_resources(resources: Mapping[str, Any]) -> str:
    """Returns resources as text, such as `num_cpus 1, large_memory 1`."""
    flat = {**{k: v for k, v in resources.items() if k != "resources"}, **resources.get("resources", {})}
    amounts = [f"{name} {amount:g}" for name, amount in flat.items() if amount and not name.startswith("node:")]
    return ", ".join(amounts) or "nothing"


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
