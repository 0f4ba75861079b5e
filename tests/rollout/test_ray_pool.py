"""Tests of workers in Ray actors, on a cluster whose nodes are all on this machine."""

from __future__ import annotations

import functools
import os
import re
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
import ray
from app.rollout.ray_cluster.ray_actor import ActorSpec, check_slots_divide
from app.rollout.ray_cluster.ray_pool import RayWorkerPool, connect
from app.rollout.ray_cluster.ray_worker_client import ActorLostError, RayWorker, WeightBroadcast
from ray.cluster_utils import Cluster

from app.distributed.stop_check import StoppedError
from app.model.io.model_files import open_model
from app.prompts.tokenizer import load_tokenizer
from app.rollout.scheduling.metrics import schedule_metrics
from app.rollout.scheduling.protocol import SegmentEnded, Suspend, WorkerJoined, WorkerLost
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.scheduling.scheduler import POLICIES
from app.rollout.sequence import RolloutSequence, SuspendedSequence
from app.rollout.workers.async_generation import AsyncRollout
from app.rollout.workers.worker_pool import ScheduleConfig
from settings.errors import InputError
from tests.rollout.test_scheduled_workers import (
    EAGER,
    KINDS,
    SHORT,
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

LARGE = {"large_memory": 1.0}
ANY_TIME_S = 120.0
"""A time-out in seconds that no test reaches."""


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
        nodes.add_node(num_cpus=1, resources=LARGE)
    return nodes


def actors(
    address: str | None, *, num_workers: int = 2, num_cpus: int = 1, start_timeout_s: float = ANY_TIME_S, **changes: Any
) -> RayWorkerPool:
    engine, broadcast = engine_on(0), WeightBroadcast()
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
    workers = [
        RayWorker(
            name=f"{kind}-{number}",
            kind=kind,
            engine=engine,
            cache_timeout_s=ANY_TIME_S / 2,
            spec=replace(plan, kind=kind, **changes),
            actor_options={"num_cpus": num_cpus, "num_gpus": 0, "resources": LARGE if kind == "heavy" else {}},
            broadcast=broadcast,
            lease_s=ANY_TIME_S,
            start_timeout_s=start_timeout_s,
        )
        for number, kind in enumerate(KINDS[:num_workers])
    ]
    schedule = ScheduleConfig("adaptive", EAGER, SHORT, single_thread=False)
    return RayWorkerPool(workers, schedule, decode_text=spell, address=address, start_timeout_s=start_timeout_s)


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[RayWorkerPool]:
    made = actors(cluster)
    made.compile(REQUEST.rules)
    yield made
    made.shut_down()


@pytest.fixture
def rested(pool: RayWorkerPool) -> Iterator[RayWorkerPool]:
    """Waits until all actors are ready again."""
    schedule, leases = pool.schedule, [worker.lease_s for worker in pool.ray_workers]
    assert all(worker.is_ready(timeout_s=ANY_TIME_S) for worker in pool.ray_workers)
    yield pool
    pool.schedule, pool.on_progress = schedule, None
    for worker, lease_s in zip(pool.ray_workers, leases, strict=True):
        worker.lease_s = lease_s


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


def when_in_a_segment(pool: RayWorkerPool, worker: RayWorker, do: Callable[[], object]) -> None:
    """Calls a function once, as soon as the worker decodes samples that have tokens."""
    done: list[bool] = []

    def watch(table: SampleTable) -> None:
        if not done and any(entry.worker == worker.name and entry.num_tokens for entry in table):
            done.append(True)
            do()

    pool.on_progress = watch


def signalled(worker: RayWorker, number: signal.Signals) -> Callable[[], None]:
    assert worker.actor_info is not None
    return functools.partial(os.kill, worker.actor_info.pid, number)


def the_lost(pool: RayWorkerPool) -> list[tuple[str, str]]:
    return [(event.worker, event.why) for event, _ in pool.records if isinstance(event, WorkerLost)]


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_actors_draw_what_local_workers_draw(rested: RayWorkerPool, policy: str, in_turn: bool) -> None:
    rested.schedule = replace(rested.schedule, policy=policy, single_thread=in_turn)
    samples = samples_of(rested)
    assert bits(samples) == bits(expected())
    last = {
        row.uid: event.worker for event, _ in rested.records if isinstance(event, SegmentEnded) for row in event.rows
    }
    assert {s.uid: s.worker for s in samples} == last and all(s.elapsed_s > 0 for s in samples)
    assert rested.take_counters().generated_tokens == sum(LENGTHS) == schedule_metrics(rested.records).useful_tokens
    joined = [event for event, _ in rested.records if isinstance(event, WorkerJoined)]
    assert [event.worker for event in joined] == ["fast-0", "heavy-1"]


def test_heavy_actors_are_where_the_memory_is(pool: RayWorkerPool, cluster: str) -> None:
    assert "large_memory" in ray.cluster_resources() and "large_memory" not in ray.available_resources()
    pids = {worker.actor_info.pid for worker in pool.ray_workers if worker.actor_info}
    assert len(pids) == 2 and os.getpid() not in pids


def test_suspended_rows_take_their_caches_to_other_actors(rested: RayWorkerPool) -> None:
    rested.schedule = replace(rested.schedule, policy="pdsr_v2", single_thread=True)
    samples_of(rested)
    moved = [one for one in admitted(rested) if one.how == "copy"]
    assert any(isinstance(command, Suspend) for command in commands_of(rested))
    assert {one.source for one in moved} >= {"fast-0"} and all(one.num_tokens for one in moved)
    assert rested.take_counters().recomputed_tokens == 0


def test_an_actor_that_is_killed_loses_nothing_and_is_replaced(rested: RayWorkerPool) -> None:
    first = rested.ray_workers[0]
    when_in_a_segment(rested, first, signalled(first, signal.SIGKILL))
    killed = first.actor_info
    rested.take_counters()
    assert bits(samples_of(rested)) == bits(expected())
    ((name, why),) = the_lost(rested)
    assert name == "fast-0" and "the actor of fast-0 is lost: ActorDiedError" in why
    counts = rested.take_counters()
    assert counts.generated_tokens == sum(LENGTHS) and counts.recomputed_tokens > 0
    assert first.is_ready(timeout_s=ANY_TIME_S) and first.actor_info != killed
    assert bits(samples_of(rested)) == bits(expected())
    assert len([event for event, _ in rested.records if isinstance(event, WorkerJoined)]) == 2


def test_an_actor_that_falls_silent_is_given_up(rested: RayWorkerPool) -> None:
    heavy = rested.ray_workers[1]
    heavy.lease_s = 2.0
    when_in_a_segment(rested, heavy, signalled(heavy, signal.SIGSTOP))
    assert bits(samples_of(rested)) == bits(expected())
    ((name, why),) = the_lost(rested)
    assert name == "heavy-1" and re.search(r"ActorLostError\('the actor of heavy-1 is lost: silent for [\d.]+ s", why)


def test_a_cache_that_went_with_its_actor_is_computed_anew(rested: RayWorkerPool) -> None:
    """The actor that would send the cache is killed right after the row was suspended."""
    rested.schedule = replace(rested.schedule, policy="pdsr_v2", single_thread=True)
    first = rested.ray_workers[0]
    suspend, killed = first.suspend, []

    def suspend_and_die(row: RolloutSequence) -> SuspendedSequence:
        kept = suspend(row)
        if not killed:
            killed.append(row.uid)
            signalled(first, signal.SIGKILL)()
        return kept

    first.suspend = suspend_and_die
    try:
        assert bits(samples_of(rested)) == bits(expected())
    finally:
        del first.suspend
    assert killed and [name for name, _ in the_lost(rested)] == ["fast-0"]


def test_weights_are_put_into_the_store_once_a_version(rested: RayWorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_an_actor_without_a_place_is_named_in_time(cluster: str, pool: RayWorkerPool) -> None:
    made = actors(cluster, num_workers=1, start_timeout_s=1.0)
    with pytest.raises(InputError, match=r"after 1 s 1 of 1 actors have not started; fast-0 needs num_cpus 1"):
        made.start()
    assert ray.is_initialized()


def test_nobody_waits_for_actors_who_was_asked_to_stop(cluster: str, pool: RayWorkerPool) -> None:
    made = actors(cluster, num_workers=1)
    looks = iter([False, True])
    made.stop_requested = lambda: next(looks)
    with pytest.raises(StoppedError):
        made.start()
    assert ray.is_initialized()


def test_an_actor_that_cannot_start_says_why(cluster: str, pool: RayWorkerPool) -> None:
    made = actors(cluster, num_workers=1, num_cpus=0, platforms="cuda")
    with pytest.raises(
        InputError, match=r"the actor of fast-0, which needs nothing, cannot start: .*JAX finds no cuda devices"
    ):
        made.start()


def test_slots_that_an_actors_devices_cannot_share_are_refused(pool: RayWorkerPool) -> None:
    with pytest.raises(InputError, match=r"rollout\.workers\.fast\.slots: batches of 4 rows .* the 3 devices"):
        check_slots_divide(pool.ray_workers[0].spec, 3)


@pytest.mark.parametrize(("address", "port"), [("127.0.0.1:1", 1), ("127.0.0.1:99999", 99999)])
def test_a_cluster_that_is_not_there_is_an_error(address: str, port: int) -> None:
    with pytest.raises(InputError, match=rf"rollout\.ray\.address: the cluster at 127\.0\.0\.1:{port} cannot be used"):
        connect(address, [])


def test_where_all_actors_die_the_rollout_ends_with_the_reason(rested: RayWorkerPool) -> None:
    ends = [signalled(worker, signal.SIGKILL) for worker in rested.ray_workers]
    when_in_a_segment(rested, rested.ray_workers[0], lambda: [end() for end in ends])
    with pytest.raises(ActorLostError, match=r"the actor of \S+ is lost: ActorDiedError"):
        samples_of(rested)


def test_actors_free_the_slots_of_samples_that_contain_a_stop_string(cluster: str, pool: RayWorkerPool) -> None:
    decode_text = load_tokenizer(open_model("builtin:tiny")).decode
    request = replace(REQUEST, max_new_tokens=LONGEST, stop=("1", "+"))
    made, alone = actors(cluster, num_workers=1, num_cpus=0, decode_text=decode_text), batching(engine_on(0))
    made._decode_text = alone._decode_text = decode_text
    made.compile(request.rules)
    samples = made.generate(weights_on(), PROMPTS, request)
    made.ray_workers[0].kill_actor()
    assert bits(samples) == bits(alone.generate(weights_on(), PROMPTS, request))
    assert 3 <= sum(sample.finish_reason == "stop" for sample in samples) < len(samples)
    assert made.take_counters().generated_tokens < len(samples) * LONGEST
