"""Tests of one scheduler for the workers of two hosts, which are two threads here and talk through a socket."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from threading import Event
from typing import Any, NamedTuple

import pytest

from app.distributed.control_channel import HostLostError, accept_hosts, connect_to_first_host
from app.distributed.rendezvous_check import listen
from app.distributed.stop_check import StoppedError
from app.records.sample import Sample
from app.rollout.hosts.shared_generation import AsyncGeneration, open_async_generation
from app.rollout.hosts.shared_pool import SchedulingPool, ServingPool, share_workers
from app.rollout.scheduling.length_estimator import NOTHING_LEARNED
from app.rollout.scheduling.metrics import schedule_metrics
from app.rollout.scheduling.protocol import (
    EventRecord,
    RunSegment,
    SegmentEnded,
    WorkerJoined,
    WorkerKind,
    WorkerLost,
)
from app.rollout.scheduling.sample_states import SampleTable
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.workers.worker import RolloutWorker
from app.rollout.workers.worker_pool import ScheduleConfig
from settings.errors import InputError
from tests.rollout.test_async_generation import wait_until
from tests.rollout.test_slot_engine import DEFINITION, GROUP_SIZE, LENGTHS, PROMPTS, REQUEST, weights_on
from tests.rollout.test_worker_drivers import (
    EAGER,
    KINDS,
    SHORT,
    Mortal,
    bits,
    commands_of,
    dying,
    engine_on,
    expected,
    samples_of,
    scheduled,
    without_times,
)
from tests.tiny import make_engine, random_params, spell

HALF = 2
"""Prompts of the first host; the second has the others."""
DEADLINE_S = 120.0
KEY = REQUEST.policy_version


class TwoHosts(NamedTuple):
    """The pools of both hosts."""

    first: SchedulingPool
    second: ServingPool

    def start(self, split: int = HALF) -> list[Future[list[Sample]]]:
        """Starts a rollout on both hosts; the first has this many of the prompts."""
        num_rows = split * GROUP_SIZE
        parts = (PROMPTS[:split], LENGTHS[:num_rows]), (PROMPTS[split:], LENGTHS[num_rows:])
        threads = ThreadPoolExecutor(2)
        started = [
            threads.submit(pool.generate, weights_on(), prompts, replace(REQUEST, max_new_tokens=lengths))
            for pool, (prompts, lengths) in zip(self, parts, strict=True)
        ]
        threads.shutdown(wait=False)
        return started

    def samples(self, split: int = HALF) -> list[Sample]:
        """Returns the samples of both hosts, in the order of the prompts."""
        first, second = (started.result(DEADLINE_S) for started in self.start(split))
        return [*first, *(replace(sample, group_id=sample.group_id + split) for sample in second)]

    def lost(self) -> list[tuple[str, str]]:
        return [(event.worker, event.why) for event, _ in self.first.records if isinstance(event, WorkerLost)]

    def joined(self) -> set[str]:
        return {event.worker for event, _ in self.first.records if isinstance(event, WorkerJoined)}


@contextmanager
def two_hosts(
    policy: str = "adaptive",
    *,
    kinds: Sequence[WorkerKind] = KINDS[:2],
    in_turn: bool = False,
    lease_s: float | None = None,
) -> Iterator[TwoHosts]:
    """Two hosts with a worker of each of these kinds, every one on a device of its own."""
    schedule = ScheduleConfig(policy, EAGER, SHORT, in_turn, lease_s)
    key = secrets.token_bytes()
    with ThreadPoolExecutor(1) as threads, listen("127.0.0.1:0") as listener:
        accepted = threads.submit(accept_hosts, listener, 1, key)
        of_second = connect_to_first_host(listener.getsockname(), 1, key)
        channels = accepted.result(), [of_second]
    engines = iter(engine_on(i) for i in range(2 * len(kinds)))
    first, second = (
        share_workers(
            [RolloutWorker(f"host{host}/{kind}-{i}", kind, next(engines)) for i, kind in enumerate(kinds)],
            schedule,
            decode_text=spell,
            channels=of_host,
        )
        for host, of_host in enumerate(channels)
    )
    assert isinstance(first, SchedulingPool) and isinstance(second, ServingPool)
    try:
        yield TwoHosts(first, second)
    finally:
        first.shut_down()
        second.shut_down()


@pytest.fixture(scope="module", autouse=True)
def generated() -> None:
    """Generates the samples that tests expect before a host uses the same engine."""
    expected()


@contextmanager
def asleep(worker: RolloutWorker) -> Iterator[None]:
    """No segment of the worker ends inside the block."""
    assert isinstance(worker.engine, Mortal)
    worker.engine.sleep = Event()
    try:
        yield
    finally:
        worker.engine.sleep.set()
        worker.engine.sleep = None


def when_in_a_segment(hosts: TwoHosts, worker: RolloutWorker, do: Callable[[], object]) -> None:
    """Calls a function once, as soon as the worker decodes samples that have tokens."""
    done: list[bool] = []

    def watch(table: SampleTable) -> None:
        if not done and any(entry.worker == worker.name and entry.num_tokens for entry in table):
            done.append(True)
            do()

    hosts.first.on_progress = watch


@pytest.mark.parametrize("in_turn", [True, False])
@pytest.mark.parametrize("policy", POLICIES)
def test_two_hosts_generate_what_one_worker_does(policy: str, in_turn: bool) -> None:
    with two_hosts(policy, in_turn=in_turn) as hosts:
        for worker in (*hosts.first.workers, *hosts.second.workers):
            worker.engine.counters.take()
        assert bits(hosts.samples()) == bits(expected())
        samples = hosts.samples()
        assert bits(samples) == bits(expected())
        records = hosts.first.records
        last = {row.uid: event.worker for event, _ in records if isinstance(event, SegmentEnded) for row in event.rows}
        assert {s.uid: s.worker for s in samples} == last and all(s.elapsed_s > 0 for s in samples)
        counts = [pool.take_counters() for pool in hosts]
        assert [one.generated_tokens for one in counts] == [2 * sum(LENGTHS), 0]
        assert counts[0].prompt_tokens == 2 * GROUP_SIZE * sum(len(prompt.token_ids) for prompt in PROMPTS)
        assert schedule_metrics(records).useful_tokens == sum(LENGTHS)
        assert len(hosts.first.take_schedule_metrics()) == 2 and not hosts.second.take_schedule_metrics()


def test_workers_of_both_hosts_generate_the_samples_of_one() -> None:
    with two_hosts() as hosts:
        first, second = (started.result(DEADLINE_S) for started in hosts.start(split=0))
        assert not first and bits(second) == bits(expected())
        assert {s.worker.partition("/")[0] for s in second} == {"host0", "host1"}
        assert all(s.prompt is PROMPTS[i // GROUP_SIZE] for i, s in enumerate(second))
        again = hosts.samples(split=len(PROMPTS))
        assert bits(again) == bits(expected()) and {s.worker.partition("/")[0] for s in again} == {"host0", "host1"}


def test_samples_come_home_as_soon_as_they_are_done() -> None:
    with two_hosts(in_turn=True) as hosts:
        done: list[list[str]] = [[], []]
        for pool, of_host in zip(hosts, done, strict=True):
            pool.on_sample_done = lambda row, of_host=of_host: of_host.append(row.uid)
        samples = hosts.samples()
        assert sorted(done[0] + done[1]) == sorted(s.uid for s in samples)
        assert set(done[0]) == {s.uid for s in samples[: HALF * GROUP_SIZE]}
        assert done[1] != [s.uid for s in samples[HALF * GROUP_SIZE :]], "not in the order of the queue"


def test_suspended_rows_keep_their_caches_on_their_host_and_compute_them_again_on_another() -> None:
    with two_hosts("pdsr_v2", in_turn=True) as hosts:
        hosts.first.take_counters()
        assert bits(hosts.samples()) == bits(expected())
        host_of = {event.worker: event.host for event, _ in hosts.first.records if isinstance(event, WorkerJoined)}
        assert host_of == {f"host{host}/{kind}-{i}": host for host in (0, 1) for i, kind in enumerate(KINDS[:2])}
        moved = [
            (command.worker, one)
            for command in commands_of(hosts.first)
            if isinstance(command, RunSegment)
            for one in command.admit
            if one.num_tokens
        ]
        copied = [(worker, one.source) for worker, one in moved if one.how == "copy"]
        assert {host_of[worker] for worker, _ in copied} == {0, 1}
        assert all(source and host_of[source] == host_of[worker] for worker, source in copied)
        replayed = [one.num_tokens for _, one in moved if one.how == "replay"]
        assert replayed and hosts.first.take_counters().recomputed_tokens == sum(replayed)
        (peer,) = hosts.first.peers
        assert not peer._segments


def test_the_log_in_turn_is_reproducible_and_can_be_replayed() -> None:
    def log_of(hosts: TwoHosts) -> list[Any]:
        hosts.samples()
        return [without_times(record) for record in hosts.first.records]

    with two_hosts(in_turn=True) as hosts:
        first = log_of(hosts)
        hosts.first.new_lengths = NOTHING_LEARNED
        assert log_of(hosts) == first
        scheduler = Scheduler("adaptive", pdsr=EAGER, segment=SHORT, rebuild="replay")
        for event, commands in hosts.first.records:
            assert tuple(scheduler.handle(event)) == commands
        assert scheduler.is_finished


def test_one_scheduler_is_done_before_the_slower_of_two() -> None:
    """Counted in decode steps: all samples are those of the second host."""

    def steps(workers: Sequence[RolloutWorker], records: Sequence[EventRecord]) -> int:
        taken = {worker.name: 0 for worker in workers}
        for event, _ in records:
            if isinstance(event, SegmentEnded):
                taken[event.worker] += event.steps
        return max(taken.values())

    with two_hosts(kinds=("fast",), in_turn=True) as hosts:
        hosts.samples(split=0)
        both = [*hosts.first.workers, *hosts.second.workers]
        shared = steps(both, hosts.first.records)
        alone = scheduled(hosts.second.workers, in_turn=True)
        assert bits(samples_of(alone)) == bits(expected())
        assert shared < 0.75 * steps(alone.workers, alone.records)


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_worker_that_fails_on_another_host_loses_nothing(in_turn: bool) -> None:
    with two_hosts(in_turn=in_turn) as hosts:
        failing = hosts.second.workers[0]
        with dying(failing, lives=1):
            assert bits(hosts.samples()) == bits(expected())
        assert hosts.lost() == [(failing.name, "HostWorkerError('RuntimeError: the device is gone')")]
        assert bits(hosts.samples()) == bits(expected()) and not hosts.lost()


def test_a_slow_worker_of_another_host_is_given_up_until_it_wakes() -> None:
    with two_hosts(lease_s=2.0) as hosts:
        slow = hosts.second.workers[1]
        with asleep(slow):
            assert bits(hosts.samples()) == bits(expected())
            assert hosts.lost() == [(slow.name, "LeaseExpiredError('silent for 2.0 s')")]
            assert bits(hosts.samples()) == bits(expected())
            assert slow.name not in hosts.joined() and len(hosts.joined()) == 3
        for thread in hosts.second._stalled.values():
            thread.join()
        assert bits(hosts.samples()) == bits(expected())
        assert slow.name in hosts.joined() and not hosts.lost()


@pytest.mark.parametrize("in_turn", [True, False])
def test_the_scheduler_goes_on_without_a_host_whose_connection_breaks(in_turn: bool) -> None:
    with two_hosts(in_turn=in_turn) as hosts:
        when_in_a_segment(hosts, hosts.second.workers[0], hosts.second._channel.close)
        first, second = hosts.start()
        assert bits(first.result(DEADLINE_S)) == bits(expected()[: HALF * GROUP_SIZE])
        with pytest.raises(HostLostError, match="the connection to host 0"):
            second.result(DEADLINE_S)
        assert {name for name, _ in hosts.lost()} == {worker.name for worker in hosts.second.workers}
        assert not any(worker.engine.active_rows for pool in hosts for worker in pool.workers)


def test_an_error_on_host_0_ends_the_rollout_on_all() -> None:
    with two_hosts() as hosts:
        with ExitStack() as stack:
            for worker in (*hosts.first.workers, *hosts.second.workers):
                stack.enter_context(dying(worker, lives=1))
            first, second = hosts.start()
            with pytest.raises(RuntimeError, match="the device is gone"):
                first.result(DEADLINE_S)
            with pytest.raises(RuntimeError, match=r"on host 0, which schedules .* the device is gone"):
                second.result(DEADLINE_S)
        assert bits(hosts.samples()) == bits(expected()), "the next rollout does not know of it"


@pytest.mark.parametrize("asked", [0, 1])
def test_a_stop_of_one_host_ends_the_rollout_on_both(asked: int) -> None:
    with two_hosts() as hosts:
        looks = iter(range(4))
        hosts[asked].stop_requested = lambda: next(looks, None) is None
        for started in hosts.start():
            with pytest.raises(StoppedError):
                started.result(DEADLINE_S)
        hosts[asked].stop_requested = lambda: False
        assert bits(hosts.samples()) == bits(expected())


def test_a_host_that_refuses_its_prompts_leaves_the_others_theirs() -> None:
    with two_hosts() as hosts:

        def refuse(rows: object) -> None:
            raise InputError("too long")

        hosts.second.check_fits = refuse
        first, second = hosts.start()
        with pytest.raises(InputError, match="too long"):
            second.result(DEADLINE_S)
        assert bits(first.result(DEADLINE_S)) == bits(expected()[: HALF * GROUP_SIZE])
        del hosts.second.check_fits
        assert bits(hosts.samples()) == bits(expected())


def test_a_stream_that_host_0_does_not_read_to_its_end_ends_on_the_other_too() -> None:
    with two_hosts() as hosts, ThreadPoolExecutor(1) as threads:
        second = threads.submit(hosts.second.generate, weights_on(), PROMPTS, REQUEST)
        stream = hosts.first.stream(weights_on(), PROMPTS, REQUEST)
        assert bits([next(stream)]) == bits(expected()[:1])
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
        with pytest.raises(StoppedError):
            second.result(DEADLINE_S)
        assert not any(worker.engine.active_rows for pool in hosts for worker in pool.workers)


# While training continues ----------------------------------------------------------------------------------------


@contextmanager
def generating(hosts: TwoHosts, rounds: Sequence[int]) -> Iterator[list[AsyncGeneration]]:
    """Opens a rollout that runs during training on both hosts, and submits rounds of the first prompts of each."""
    requests = [replace(REQUEST, max_new_tokens=lengths) for lengths in (OWN[0][1], OWN[1][1])]
    with ThreadPoolExecutor(2) as threads:
        opened = threads.map(
            lambda of_host: open_async_generation(of_host[0], weights_on(), of_host[1]),
            zip(hosts, requests, strict=True),
        )
        generations = list(opened)
    for version in rounds:
        for generation, (prompts, _) in zip(generations, OWN, strict=True):
            generation.submit(prompts, noise_step=version)
    try:
        yield generations
    finally:
        for generation in reversed(generations):
            generation.close()


OWN = [(PROMPTS[:HALF], LENGTHS[: HALF * GROUP_SIZE]), (PROMPTS[HALF:], LENGTHS[HALF * GROUP_SIZE :])]
"""Prompts of each host, and the lengths of their samples."""


@pytest.mark.parametrize("in_turn", [True, False])
def test_rounds_of_both_hosts_are_generated_together(in_turn: bool) -> None:
    with two_hosts(in_turn=in_turn) as hosts:
        with generating(hosts, [KEY] * 3) as (first, second):
            for _ in range(2):
                samples = first.collect_round(), second.collect_round(first_group_id=HALF)
                assert bits([*samples[0], *samples[1]]) == bits(expected())
        assert len(hosts.first.take_schedule_metrics()) == 2 and not hosts.second.take_schedule_metrics()
        assert bits(hosts.samples()) == bits(expected()), "the workers are free for other rollouts"


def test_each_host_publishes_weights_to_its_own_workers() -> None:
    newer = make_engine(DEFINITION).to_decode_weights(random_params(DEFINITION, seed=1))
    with two_hosts(in_turn=True) as hosts, generating(hosts, [KEY]) as generations:
        for generation in generations:
            generation.collect_round()
            generation.publish(newer, policy_version=KEY + 1)
        assert hosts.first.learned_lengths.prompts.keys() == {prompt.uid for prompt in PROMPTS}
        for generation, (prompts, _) in zip(generations, OWN, strict=True):
            generation.submit(prompts, noise_step=KEY + 1)
        samples = [sample for generation in generations for sample in generation.collect_round()]
        assert {s.policy_version for s in samples} == {KEY + 1}
        assert {s.worker.partition("/")[0] for s in samples} == {"host0", "host1"}
        at_once = scheduled([RolloutWorker("fast-0", "fast", engine_on(7))])
        same = at_once.generate(newer, PROMPTS, replace(REQUEST, policy_version=KEY + 1))
        assert [s.completion_ids.tolist() for s in samples] == [s.completion_ids.tolist() for s in same]


@pytest.mark.parametrize("in_turn", [True, False])
def test_a_worker_of_another_host_joins_again_with_the_next_weights(in_turn: bool) -> None:
    with two_hosts(in_turn=in_turn) as hosts, generating(hosts, [KEY]) as generations:
        with dying(hosts.second.workers[0], lives=1):
            samples = [sample for generation in generations for sample in generation.collect_round()]
        (peer,) = hosts.first.peers
        generations[1].publish(weights_on(), policy_version=KEY + 1)
        wait_until(lambda: "host1/fast-0#2" in peer.workers)
        generations[0].publish(weights_on(), policy_version=KEY + 1)
        for generation, (prompts, _) in zip(generations, OWN, strict=True):
            generation.submit(prompts, noise_step=KEY)
        again = [sample for generation in generations for sample in generation.collect_round()]
        assert [s.completion_ids.tolist() for s in again] == [s.completion_ids.tolist() for s in samples]
        assert "host1/fast-0#2" in {sample.worker for sample in again}
        assert {sample.policy_version for sample in again} == {KEY + 1}
        segments = generations[0].take_segments(since=0.0)
        assert {"host0/fast-0", "host1/fast-0", "host1/fast-0#2"} <= {segment.worker for segment in segments}
        assert not generations[1].take_segments(since=0.0)


def test_each_host_knows_how_many_of_its_rounds_are_complete() -> None:
    with two_hosts(in_turn=True) as hosts, generating(hosts, [KEY] * 2) as generations:
        for generation in generations:
            generation.collect_round()
        wait_until(lambda: all(generation.num_ready for generation in generations))
        for generation in generations:
            generation.collect_round()
            assert generation.num_ready == 0


def test_a_failure_on_host_0_surfaces_where_any_host_takes_samples() -> None:
    with two_hosts() as hosts, ExitStack() as stack:
        for worker in (*hosts.first.workers, *hosts.second.workers):
            stack.enter_context(dying(worker, lives=1))
        first, second = stack.enter_context(generating(hosts, [KEY]))
        with pytest.raises(RuntimeError, match="the device is gone"):
            first.collect_round()
        with pytest.raises(RuntimeError, match=r"on host 0, which schedules .* the device is gone"):
            second.collect_round()


def test_an_open_rollout_goes_on_without_a_host_that_leaves() -> None:
    with two_hosts() as hosts, generating(hosts, [KEY] * 2) as (first, second):
        hosts.second._channel.close()
        for _ in range(2):
            assert bits(first.collect_round()) == bits(expected()[: HALF * GROUP_SIZE])
        first.submit(OWN[0][0], noise_step=KEY)
        assert bits(first.collect_round()) == bits(expected()[: HALF * GROUP_SIZE])
        with pytest.raises(HostLostError):
            for _ in range(2):
                second.collect_round()
