"""Tests of workers in Ray actors, on a cluster whose nodes are all on this machine."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
import ray
from ray.cluster_utils import Cluster

from app.distributed.stop_check import StoppedError
from app.model.io.model_files import open_model
from app.prompts.tokenizer import load_tokenizer
from app.rollout.scheduling.protocol import SegmentEnded, Suspend, WorkerJoined, WorkerLost
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.scheduling.schedule_metrics import schedule_metrics
from app.rollout.workers import ray_worker
from app.rollout.workers.async_generation import AsyncRollout
from app.rollout.workers.ray_actor import ActorSpec, check_slots_divide
from app.rollout.workers.ray_worker import RayCluster, RayWorker
from app.rollout.workers.worker import RolloutWorker, WorkerDiedError
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from settings.errors import InputError
from tests.rollout.test_scheduled_workers import (
    EAGER,
    KINDS,
    SHORT,
    EagerPool,
    admitted,
    bits,
    commands_of,
    engine_on,
    expected,
    samples_of,
    scheduled,
    workers_on,
)
from tests.rollout.test_slot_engine import DEFINITION, LENGTHS, LONGEST, PROMPTS, REQUEST, batching, weights_on
from tests.tiny import ODD, make_engine, random_params, spell

pytestmark = pytest.mark.slow

LARGE = {"CPU": 1.0, "large_memory": 1.0}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a cluster with two nodes: one with many slots, one with much memory."""
    with pytest.MonkeyPatch.context() as environment:
        # Of the nodes, and so of the actors: what one compiles, the others read.
        environment.setenv("JAX_ENABLE_COMPILATION_CACHE", "true")
        environment.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("compiled")))
        environment.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        nodes = started_nodes()
    yield str(nodes.address)
    nodes.shutdown()


def started_nodes() -> Cluster:
    with warnings.catch_warnings():
        # JAX warns of forks. These children do nothing of this process before they become other programs.
        warnings.filterwarnings("ignore", message="os.fork", category=RuntimeWarning)
        nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        nodes.add_node(num_cpus=1, resources={"large_memory": 1.0})
    return nodes


def actors(
    address: str, *, num_workers: int = 2, resources: dict[str, float] | None = None, **changes: Any
) -> RolloutWorkerPool:
    engine = engine_on(0)
    plan = ActorSpec(
        architecture=ODD,
        shapes=engine.shapes,
        kind="fast",
        eos_ids=(),
        dtype="float32",
        exact=True,
        tp=1,
        platforms="cpu",
        matmul_precision="highest",
    )
    usual = {"CPU": 1.0} if resources is None else resources
    of_kinds = {"fast": usual, "heavy": LARGE}
    cluster = RayCluster(address, [of_kinds[kind] for kind in KINDS[:num_workers]])
    workers = [
        RayWorker(
            name=f"{kind}-{number}",
            kind=kind,
            engine=engine,
            spec=replace(plan, kind=kind, **changes),
            cluster=cluster,
            resources=of_kinds[kind],
        )
        for number, kind in enumerate(KINDS[:num_workers])
    ]
    schedule = ScheduleConfig("adaptive", EAGER, SHORT, in_order=False)
    return EagerPool(workers, schedule, decode_text=spell)


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[RolloutWorkerPool]:
    made = actors(cluster)
    made.compile(REQUEST.rules)
    yield made
    made.shut_down()


@pytest.fixture
def rested(pool: RolloutWorkerPool) -> Iterator[RolloutWorkerPool]:
    """A pool whose schedule a test may change."""
    schedule = pool.schedule
    yield pool
    pool.schedule, pool.on_progress = schedule, None


@pytest.fixture
def mortal(cluster: str, pool: RolloutWorkerPool) -> Iterator[RolloutWorkerPool]:
    """A pool of two actors that a test may kill; they need no cores, since those of `pool` have all."""
    made = actors(cluster, resources={})
    for worker in made.workers:
        assert isinstance(worker, RayWorker)
        worker.resources = {}
    made.compile(REQUEST.rules)
    yield made
    for worker in made.workers:
        worker.shut_down()


@contextmanager
def counting_puts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Counts the objects that this process puts into Ray's object store."""
    made: list[Any] = []

    def put(value: Any) -> Any:
        made.append(real(value))
        return made[-1]

    real = ray.put
    with monkeypatch.context() as patch:
        patch.setattr(ray, "put", put)
        yield made


def when_in_a_segment(pool: RolloutWorkerPool, worker: RolloutWorker, do: Callable[[], object]) -> None:
    """Calls a function once, as soon as the worker decodes samples that have tokens."""
    done: list[bool] = []

    def watch(table: SampleTable) -> None:
        if not done and any(entry.worker == worker.name and entry.num_tokens for entry in table):
            done.append(True)
            do()

    pool.on_progress = watch


def kill(worker: RolloutWorker) -> None:
    assert isinstance(worker, RayWorker) and worker.info is not None
    os.kill(worker.info.pid, signal.SIGKILL)


def the_lost(pool: RolloutWorkerPool) -> list[str]:
    return [event.worker for event, _ in pool.records if isinstance(event, WorkerLost)]


@pytest.mark.parametrize(("policy", "in_turn"), [("pdsr_v1", True), ("adaptive", False)])
def test_actors_draw_what_local_workers_draw(rested: RolloutWorkerPool, policy: str, in_turn: bool) -> None:
    rested.schedule = replace(rested.schedule, policy=policy, in_order=in_turn)
    samples = samples_of(rested)
    assert bits(samples) == bits(expected())
    last = {
        row.uid: event.worker for event, _ in rested.records if isinstance(event, SegmentEnded) for row in event.rows
    }
    assert {s.uid: s.worker for s in samples} == last and all(s.elapsed_s > 0 for s in samples)
    assert rested.take_counters().generated_tokens == sum(LENGTHS) == schedule_metrics(rested.records).useful_tokens
    joined = [event for event, _ in rested.records if isinstance(event, WorkerJoined)]
    assert [event.worker for event in joined] == ["fast-0", "heavy-1"]


def test_heavy_actors_are_where_the_memory_is(pool: RolloutWorkerPool, cluster: str) -> None:
    assert "large_memory" in ray.cluster_resources() and "large_memory" not in ray.available_resources()
    pids = {worker.info.pid for worker in pool.workers if isinstance(worker, RayWorker) and worker.info}
    assert len(pids) == 2 and os.getpid() not in pids


def test_suspended_rows_are_computed_again_where_they_continue(rested: RolloutWorkerPool) -> None:
    rested.schedule = replace(rested.schedule, policy="pdsr_v2", in_order=True)
    rested.take_counters()
    assert bits(samples_of(rested)) == bits(expected())
    assert any(isinstance(command, Suspend) for command in commands_of(rested))
    moved = [one for one in admitted(rested) if one.num_tokens]
    assert moved and all(one.how == "recompute" for one in moved)
    recomputed = rested.take_counters().recomputed_tokens
    assert recomputed == schedule_metrics(rested.records).repacked_tokens > 0


def test_an_actor_that_is_killed_loses_nothing(mortal: RolloutWorkerPool) -> None:
    first = mortal.workers[0]
    when_in_a_segment(mortal, first, lambda: kill(first))
    assert bits(samples_of(mortal)) == bits(expected())
    assert the_lost(mortal) == ["fast-0"] and first.is_lost
    counts = mortal.take_counters()
    assert counts.generated_tokens == sum(LENGTHS) and counts.recomputed_tokens > 0
    assert bits(samples_of(mortal)) == bits(expected())
    assert [event.worker for event, _ in mortal.records if isinstance(event, WorkerJoined)] == ["heavy-1"]


def test_weights_are_put_into_the_store_once_a_version(
    rested: RolloutWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, version = make_engine(DEFINITION), REQUEST.policy_version
    older, newer = (engine.to_decode_weights(random_params(DEFINITION, seed)) for seed in (0, 1))
    with counting_puts(monkeypatch) as puts:
        generation = AsyncRollout(rested, older, REQUEST)
        with closing(generation):
            generation.submit(PROMPTS, noise_step=version)
            first = generation.collect_round()
            generation.publish(newer, policy_version=version + 1)
            generation.submit(PROMPTS, noise_step=version + 1)
            second = generation.collect_round()
        assert len(puts) == 2
    assert bits(first) == bits(expected())
    assert {s.policy_version for s in second} == {version + 1}
    at_once = replace(REQUEST, policy_version=version + 1)
    assert bits(second) == bits(scheduled(workers_on(1)).generate(newer, PROMPTS, at_once))


def test_an_actor_without_a_place_is_named_in_time(
    cluster: str, pool: RolloutWorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_worker, "START_TIMEOUT_S", 1.0)
    made = actors(cluster, num_workers=1)
    with pytest.raises(InputError, match=r"after 1 s the actor of fast-0 has not started and compiled; it needs CPU 1"):
        made.compile(REQUEST.rules)
    made.shut_down()
    assert ray.is_initialized()


def test_nobody_waits_for_actors_who_was_asked_to_stop(cluster: str, pool: RolloutWorkerPool) -> None:
    made = actors(cluster, num_workers=1)
    looks = iter([False, True])
    made.stop_requested = lambda: next(looks)
    with pytest.raises(StoppedError):
        made.compile(REQUEST.rules)
    made.shut_down()
    assert ray.is_initialized()


def test_an_actor_that_cannot_start_says_why(cluster: str, pool: RolloutWorkerPool) -> None:
    made = actors(cluster, num_workers=1, resources={}, platforms="cuda")
    with pytest.raises(
        InputError, match=r"the actor of fast-0, which needs nothing, cannot start: .*JAX finds no cuda devices"
    ):
        made.compile(REQUEST.rules)


def test_slots_that_an_actors_devices_cannot_share_are_refused(pool: RolloutWorkerPool) -> None:
    first = pool.workers[0]
    assert isinstance(first, RayWorker)
    with pytest.raises(InputError, match=r"rollout\.workers\.fast\.slots: batches of 4 rows .* the 3 devices"):
        check_slots_divide(first.spec, 3)


@pytest.mark.parametrize(("address", "port"), [("127.0.0.1:1", 1), ("127.0.0.1:99999", 99999)])
def test_a_cluster_that_is_not_there_is_an_error(address: str, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(InputError, match=rf"rollout\.ray\.address: the cluster at 127\.0\.0\.1:{port} cannot be used"):
        RayCluster(address, []).connect()


def test_where_all_actors_die_the_rollout_ends_with_the_reason(mortal: RolloutWorkerPool) -> None:
    when_in_a_segment(mortal, mortal.workers[0], lambda: [kill(worker) for worker in mortal.workers])
    with pytest.raises(WorkerDiedError, match=r"the actor of \S+ is lost: ActorDiedError"):
        samples_of(mortal)


def test_actors_free_the_slots_of_samples_that_contain_a_stop_string(cluster: str, pool: RolloutWorkerPool) -> None:
    decode_text = load_tokenizer(open_model("builtin:tiny")).decode
    request = replace(REQUEST, max_new_tokens=LONGEST, stop=("1", "+"))
    made, alone = actors(cluster, num_workers=1, resources={}, decode_text=decode_text), batching(engine_on(0))
    made._decode_text = alone._decode_text = decode_text
    made.compile(request.rules)
    samples = made.generate(weights_on(), PROMPTS, request)
    made.shut_down()
    assert bits(samples) == bits(alone.generate(weights_on(), PROMPTS, request))
    assert 3 <= sum(sample.finish_reason == "stop" for sample in samples) < len(samples)
    assert made.take_counters().generated_tokens < len(samples) * LONGEST
