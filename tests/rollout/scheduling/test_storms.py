"""Whole rollouts on a virtual clock: invariants under random faults, and makespans of the policies."""

from collections import Counter

import numpy as np
import pytest

from app.rollout.scheduling.protocol import RunSegment
from app.rollout.scheduling.schedule_metrics import schedule_metrics
from app.rollout.scheduling.scheduler import POLICIES
from tests.rollout.scheduling import length_traces
from tests.rollout.scheduling.driving import make_scheduler
from tests.rollout.scheduling.invariants import is_finished
from tests.rollout.scheduling.length_traces import Trace, TraceSample
from tests.rollout.scheduling.simulator import Costs, SchedulerSimulator, SimulatedWorkerSpec
from tests.rollout.scheduling.storms import storm

STEPS_ONLY = Costs(step_s=1.0)
REALISTIC = Costs(step_s=3e-3, segment_s=1.5e-3, move_s=1e-3)
PAIR = [SimulatedWorkerSpec("fast-0", "fast", 8, (2, 4)), SimulatedWorkerSpec("heavy-0", "heavy", 8, (2, 4))]


def simulated(policy: str, trace: Trace, workers: list[SimulatedWorkerSpec], cost: Costs = STEPS_ONLY, **more):
    return schedule_metrics(
        SchedulerSimulator(make_scheduler(policy, **more), trace, workers, cost, max_new=4096).run()
    )


def lone(*lengths: int) -> Trace:
    return [TraceSample(f"p{i}/s0", f"p{i}", 0, length) for i, length in enumerate(lengths)]


def test_no_invariant_breaks_in_random_rollouts_under_random_faults() -> None:
    faulty = 0
    for seed in [*range(300), 875, 1342, 1477]:
        clock = storm(seed)
        clock.run()
        assert is_finished(clock.scheduler), f"seed {seed}"
        faulty += clock.num_faults > 0
    assert faulty > 150


def test_no_invariant_breaks_while_environments_answer() -> None:
    seen = Counter[str]()
    for seed in range(300):
        clock = storm(seed, has_turns=True)
        records = clock.run()
        assert is_finished(clock.scheduler), f"seed {seed}"
        admitted = [one for _, made in records for run in made if isinstance(run, RunSegment) for one in run.admit]
        seen.update(turns=len(clock.turns_given), resumes=sum(one.how == "resume" for one in admitted))
        if not clock.num_faults:
            ends = {one.uid: (one.length, [turn.end for turn in one.turns]) for one in clock.trace_samples.values()}
            given = {uid: sorted(end for owner, end in clock.turns_given if owner == uid) for uid in ends}
            table = clock.scheduler.samples.entries
            # Limits of the policy may truncate samples.
            whole = {uid for uid in ends if uid in table and table[uid].num_tokens == ends[uid][0]}
            assert whole >= {uid for uid in table if table[uid].finish != "length"}
            assert all(given[uid] == ends[uid][1] for uid in whole)
            seen.update(calm=1, whole=len(whole))
    assert seen["turns"] > 3000 and seen["resumes"] > 2000
    assert seen["calm"] > 40 and seen["whole"] > 200


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "sync"])
def test_slow_environments_cost_little_while_samples_take_the_slots_of_others(policy: str) -> None:
    """A turn takes 100 s, an answer 500 s: six samples for each slot keep it busy; by default five begin."""
    trace = length_traces.log_normal(
        np.random.default_rng(0), prompts=40, group=4, mean=500, sigma=0.3, correlation=0.5, max_new=4096
    )

    def makespan_s(*, latency_s: float, max_suspended: int | None) -> float:
        episodes = length_traces.with_turns(trace, turn=100, observation=10, latency_s=latency_s)
        worker = [SimulatedWorkerSpec("w", "fast", 8)]
        return simulated(policy, episodes, worker, has_turns=True, max_suspended=max_suspended).makespan_s

    fast_s = makespan_s(latency_s=0.0, max_suspended=None)
    assert makespan_s(latency_s=100.0, max_suspended=None) < 1.2 * fast_s
    assert makespan_s(latency_s=500.0, max_suspended=None) < 1.5 * fast_s
    assert 2.5 * fast_s < makespan_s(latency_s=500.0, max_suspended=8) < 3.5 * fast_s
    assert makespan_s(latency_s=500.0, max_suspended=0) > 5 * fast_s


@pytest.mark.parametrize("policy", POLICIES)
def test_without_faults_every_sample_becomes_what_the_trace_says(policy: str) -> None:
    trace = length_traces.log_normal(
        np.random.default_rng(0), prompts=8, group=4, mean=300, sigma=1.0, correlation=0.5, max_new=4096
    )
    clock = SchedulerSimulator(make_scheduler(policy), trace, PAIR, REALISTIC, max_new=4096, check=True)
    clock.run()
    assert {entry.uid: entry.num_tokens for entry in clock.scheduler.samples} == {one.uid: one.length for one in trace}


def test_makespans_by_hand() -> None:
    worker = [SimulatedWorkerSpec("w", "fast", 2)]
    trace = lone(400, 100, 100, 200)
    assert simulated("sync", trace, worker).makespan_s == 400 + 200
    assert simulated("adaptive", trace, worker).makespan_s == 400
    assert simulated("sync", trace, worker).bubble == pytest.approx(1 - 8 / 12)


def test_workers_on_one_device_take_turns() -> None:
    trace = lone(5, 5)
    apart = [SimulatedWorkerSpec("a", "fast", 1), SimulatedWorkerSpec("b", "fast", 1)]
    together = [SimulatedWorkerSpec("a", "fast", 1, device="cpu"), SimulatedWorkerSpec("b", "fast", 1, device="cpu")]
    assert simulated("sync", trace, apart).makespan_s == 5
    assert simulated("sync", trace, together).makespan_s == 10


def test_adaptive_is_well_ahead_of_sync() -> None:
    ahead = []
    for seed in range(3):
        trace = length_traces.log_normal(
            np.random.default_rng(seed), prompts=16, group=8, mean=512, sigma=0.8, correlation=0.5, max_new=4096
        )
        found = simulated("adaptive", trace, PAIR, REALISTIC)
        ahead.append(simulated("sync", trace, PAIR, REALISTIC).makespan_s / found.makespan_s)
    assert np.mean(ahead) > 1.6


def test_adaptive_loses_nothing_on_equal_lengths() -> None:
    trace = length_traces.equal(prompts=16, group=8, length=512)
    adaptive, sync = (simulated(policy, trace, PAIR, REALISTIC).makespan_s for policy in ("adaptive", "sync"))
    assert adaptive <= 1.03 * sync


def test_the_host_makes_a_segment_ready_while_another_worker_has_the_device() -> None:
    cost = Costs(step_s=1.0, segment_s=3.0)
    alone = [SimulatedWorkerSpec("a", "fast", 1)]
    together = [SimulatedWorkerSpec("a", "fast", 1, device="cpu"), SimulatedWorkerSpec("b", "fast", 1, device="cpu")]
    assert simulated("sync", lone(5, 5, 5, 5), alone, cost).makespan_s == 4 * (3 + 5)
    # Only the very first has to be waited for.
    assert simulated("sync", lone(5, 5, 5, 5), together, cost).makespan_s == 3 + 4 * 5
