"""Workers in Ray actors, on a cluster of several nodes that are all this machine: the same samples as from any others."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'grpo[ray]'")
import ray
from ray.cluster_utils import Cluster

from app.rollout.ahead import Generation
from app.rollout.ray_actor import SlotPlan
from app.rollout.ray_pool import RayWorkers
from app.rollout.ray_worker import Broadcast, RemoteWorker
from app.rollout.scheduled import Schedule
from app.rollout.scheduling.events import Suspend, WorkerJoined, WorkerLost
from app.rollout.scheduling.figures import figures
from app.rollout.scheduling.ledger import Ledger
from settings.errors import InputError
from tests.rollout.test_slots import ARGUMENTS, DEFINITION, GROUP_SIZE, LENGTHS, PROMPTS, weights_on
from tests.rollout.test_workers import (
    EAGER,
    KINDS,
    SHORT,
    admitted,
    bits,
    commands_of,
    engine_on,
    expected,
    samples_of,
)
from tests.tiny import ODD, spell

pytestmark = pytest.mark.slow

LARGE = {"large_memory": 1.0}
ANY_TIME_S = 120.0
"""Longer than anything here takes."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster of two nodes: one with many slots, one with much memory."""
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
    nodes.add_node(num_cpus=1, resources=LARGE)
    yield nodes.address
    nodes.shutdown()


def actors(address: str | None, *, policy: str = "adaptive", in_turn: bool = False, lease_s: float = ANY_TIME_S, num_workers: int = 3, **changes: Any) -> RayWorkers:
    engine, broadcast = engine_on(0), Broadcast()
    plan = SlotPlan(ODD, engine.shapes, "rollout.workers.fast.slots", (), "float32", True, 1, "cpu", jax.config.jax_default_matmul_precision)
    workers = [
        RemoteWorker(
            name=f"{kind}-{number}",
            kind=kind,
            engine=engine,
            patience_s=lease_s / 2,
            plan=replace(plan, **changes),
            needs={"num_cpus": 1, "num_gpus": 0, "resources": LARGE if kind == "heavy" else {}},
            broadcast=broadcast,
            lease_s=lease_s,
            start_timeout_s=ANY_TIME_S,
        )
        for number, kind in enumerate(KINDS[:num_workers])
    ]
    schedule = Schedule(policy, EAGER, SHORT, in_turn)
    return RayWorkers(workers, schedule, decode_text=spell, address=address, start_timeout_s=ANY_TIME_S)


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[RayWorkers]:
    made = actors(cluster)
    made.compile(ARGUMENTS["rules"])
    yield made
    made.shut_down()


def test_actors_draw_what_local_workers_draw(pool: RayWorkers) -> None:
    samples = samples_of(pool)
    assert bits(samples) == bits(expected())
