"""Tests workers in Ray actors, on a cluster whose nodes are all on this machine."""

import os
import signal
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install -e '.[ray]'")
import ray

from app.distributed.stop_check import StoppedError, never_stop
from app.rollout.scheduling.protocol import RunSegment, Suspend, WorkerJoined, WorkerLost
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.scheduling.schedule_metrics import schedule_metrics
from app.rollout.scheduling.segment_limits import SegmentLimits
from app.rollout.workers import ray_worker
from app.rollout.workers.ray_actor import ActorSpec, check_slots_divide
from app.rollout.workers.ray_worker import RayCluster, RayWorker
from app.rollout.workers.worker import Admission, RolloutWorker, WorkerDiedError
from app.rollout.workers.worker_pool import RolloutWorkerPool, ScheduleConfig
from settings.errors import InputError
from tests.rollout import routes as routed
from tests.rollout import worker_pools as local
from tests.rollout.slots import GROUP_SIZE, LENGTHS, PROMPTS, REQUEST, weights_on
from tests.tiny import MIXTURE, spell


def actor_spec(**changes: Any) -> ActorSpec:
    engine = local.engine_on(0, True)
    names = {"kind": "fast", "dtype": "float32", "platforms": "cpu", "matmul_precision": "highest"}
    sizes = {"definition": engine.programs.definition, "shapes": engine.shapes, "eos_ids": (), "exact": True, "tp": 1}
    return ActorSpec(**{**names, **sizes, **changes})


def actors(*resources: dict[str, float], **changes: Any) -> RolloutWorkerPool:
    """Returns a pool with an actor for each of these resources, on the cluster that this process joined or starts."""
    cluster, workers = RayCluster("local", resources), []
    for number, (kind, needed) in enumerate(zip(local.KINDS, resources, strict=False)):
        of_actor: Any = {"spec": actor_spec(kind=kind, **changes), "cluster": cluster, "resources": needed}
        workers.append(RayWorker(name=f"{kind}-{number}", kind=kind, engine=local.engine_on(0, True), **of_actor))
    schedule = ScheduleConfig("adaptive", local.EAGER, local.SHORT, in_order=False)
    return local.EagerPool(workers, schedule, decode_text=spell, stop_text=spell)


@pytest.fixture(scope="module")
def pool() -> Iterator[RolloutWorkerPool]:
    """Returns two actors that use all cores of a new cluster."""
    made = actors({"CPU": 1.0}, {"CPU": 1.0, "large_memory": 1.0})
    made.compile(REQUEST.rules)
    yield made
    made.shut_down()


def kill_in_a_segment(pool: RolloutWorkerPool, worker: RolloutWorker) -> None:
    """Kills the actor as soon as it decodes samples that have tokens."""

    def watch(table: SampleTable) -> None:
        assert isinstance(worker, RayWorker) and worker.info is not None and worker.info.pid != os.getpid()
        if not killed and any(entry.worker == worker.name and entry.num_tokens for entry in table):
            killed.append(worker.info.pid)
            os.kill(worker.info.pid, signal.SIGKILL)

    killed: list[int] = []
    pool.on_progress = watch


@pytest.mark.slow
def test_actors_sample_the_same_as_local_workers(pool: RolloutWorkerPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "large_memory" in ray.cluster_resources() and "large_memory" not in ray.available_resources()
    samples = local.samples_of(pool)
    assert local.bits(samples) == local.bits(local.expected())
    local.assert_names_last_workers(samples, pool)
    counts = pool.take_counters()
    assert counts.generated_tokens == sum(LENGTHS) == schedule_metrics(pool.records).useful_tokens
    assert counts.prompt_tokens == GROUP_SIZE * sum(len(prompt.token_ids) for prompt in PROMPTS)
    # Suspended rows are recomputed where they continue.
    monkeypatch.setattr(pool, "schedule", replace(pool.schedule, policy="pdsr_v2", in_order=True))
    assert local.bits(local.samples_of(pool)) == local.bits(local.expected())
    assert any(isinstance(command, Suspend) for command in local.commands_of(pool))
    assert local.moved(pool) and all(one.how == "recompute" for one in local.moved(pool))
    assert pool.take_counters().recomputed_tokens == schedule_metrics(pool.records).repacked_tokens > 0


@pytest.mark.slow
@pytest.mark.usefixtures("pool")
def test_killing_an_actor_loses_no_samples_until_the_last_actor_dies() -> None:
    mortal = actors({}, {})
    mortal.compile(REQUEST.rules)
    first, second = mortal.workers
    kill_in_a_segment(mortal, first)
    assert local.bits(local.samples_of(mortal)) == local.bits(local.expected())
    assert [event.worker for event, _ in mortal.records if isinstance(event, WorkerLost)] == ["fast-0"]
    counts = mortal.take_counters()
    assert first.is_lost and counts.generated_tokens == sum(LENGTHS) and counts.recomputed_tokens > 0
    kill_in_a_segment(mortal, second)
    with pytest.raises(WorkerDiedError, match=r"the actor of heavy-1 is lost: ActorDiedError"):
        local.samples_of(mortal)
    assert [event.worker for event, _ in mortal.records if isinstance(event, WorkerJoined)] == ["heavy-1"]
    mortal.shut_down()


@pytest.mark.slow
@pytest.mark.usefixtures("pool")
def test_actors_return_routes_and_say_why_they_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, rows = routed.slots(), [routed.row_of(i) for i in range(3)]
    spec = actor_spec(definition=engine.programs.definition, shapes=engine.shapes, exact=False)
    of_actor: Any = {"spec": spec, "cluster": RayCluster("local", []), "resources": {}}
    worker = RayWorker(name="far", kind="fast", engine=engine, **of_actor)
    worker.wait_until_ready(never_stop)
    worker.open(weights_on((1, 1, 1), MIXTURE), routed.ROUTED, suspends=False)
    waiting = deque(Admission(row, None) for row in rows)
    for _ in range(3):
        worker.start_segment(RunSegment("far", (), SegmentLimits(4)), waiting)
        worker.finish_segment()
    worker.shut_down()
    assert all(row.finish_reason == "length" for row in rows)
    routed.assert_routes_are_those_of_the_trainer(list(map(routed.sample_of, rows)))

    for error, match, resources, platforms in [
        (StoppedError, "", {"CPU": 1.0}, "cpu"),
        (InputError, r"actor of fast-0, which needs nothing, cannot start: .*JAX finds no cuda devices", {}, "cuda"),
        (InputError, r"after 1 s the actor of fast-0 has not started and .*; it needs CPU 1", {"CPU": 1.0}, "cpu"),
    ]:
        made, looks = actors(resources, platforms=platforms), iter([False, True])
        monkeypatch.setattr(ray_worker, "START_TIMEOUT_S", 1.0 if "1 s" in match else 900.0)
        made.stop_requested = (lambda looks=looks: next(looks)) if error is StoppedError else never_stop
        with pytest.raises(error, match=match or None):
            made.compile(REQUEST.rules)
        made.shut_down()
        assert ray.is_initialized(), "only the process that joined the cluster leaves it"


def test_settings_that_ray_actors_cannot_use_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"rollout\.workers\.fast\.slots: batches of 4 rows .* the 3 devices"):
        check_slots_divide(actor_spec(), 3)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    for port in (1, 99999):
        cannot_be_used = rf"rollout\.ray\.address: the cluster at 127\.0\.0\.1:{port} cannot be used"
        with pytest.raises(InputError, match=cannot_be_used):
            RayCluster(f"127.0.0.1:{port}", []).connect()
