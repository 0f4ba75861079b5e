"""Tests invariants, makespans and metrics of whole simulated rollouts, also under random faults."""

import math
from collections import Counter

import pytest

from app.rollout.scheduling.protocol import EventRecord, NewSample, WorkerJoined
from app.rollout.scheduling.schedule_metrics import ScheduleMetricsTracker, Span, schedule_metrics, slot_spans
from tests.rollout.scheduling import driving


def assert_samples_are_whole(rollout: driving.Storm) -> None:
    """Asserts that samples, unless a limit of the policy truncated them, have the lengths and turns of the trace."""
    cut = {uid for _, made in rollout.records for uid, why in driving.suspended(made) if why == "truncated"}
    for entry in rollout.scheduler.samples:
        if entry.uid not in cut:
            traced = rollout.trace[entry.uid]
            assert entry.num_tokens == traced.length
            assert rollout.turns[entry.uid] == [end for end, *_ in traced.turns], "each turn is given once"


def assert_spans_are_apart(rollout: driving.Storm) -> None:
    ends: dict[tuple[str, int], float] = {}
    for one in slot_spans(rollout.records):
        if one.slot >= 0:
            assert one.start_s >= ends.get((one.worker, one.slot), 0.0) - 1e-9, one
            ends[one.worker, one.slot] = one.end_s


@pytest.mark.parametrize("has_turns", [False, True])
def test_scheduler_invariants_hold_in_random_rollouts_under_random_faults(has_turns: bool) -> None:
    seen = Counter[str]()
    for seed in range(90):
        rollout = driving.storm(seed, has_turns=has_turns)
        rollout.run()
        assert driving.is_finished(rollout.scheduler), f"seed {seed}"
        if not rollout.num_faults:
            assert_samples_are_whole(rollout)
            assert_spans_are_apart(rollout)
        if seed % 4 == 0:
            again = driving.storm(seed, has_turns=has_turns).scheduler
            assert [tuple(again.handle(event)) for event, _ in rollout.records] == [made for _, made in rollout.records]
        seen.update(rollout.counts)
        seen.update(turns=sum(map(len, rollout.turns.values())), calm=not rollout.num_faults)
    assert 20 < seen["calm"] < 70 and seen["copy"] > 60
    assert (seen["turns"] > 1000 and seen["resume"] > 1000) == has_turns


# On a clock ------------------------------------------------------------------------------------------------------


class Clocked(driving.Storm):
    """A rollout without faults in which segments end in order of time; each worker has a step time."""

    def __init__(self, policy: str, lengths: list[list[int]], workers: dict[WorkerJoined, float]):
        trace = [
            driving.Traced(NewSample(f"p{p}/s{i}", f"p{p}", i, 10, 400), length)
            for p, group in enumerate(lengths)
            for i, length in enumerate(group)
        ]
        scheduler = driving.make_scheduler(
            policy, segment={"min": 8, "max": 8}, pdsr={"fast_limit_tokens": 64, "probe_limit_tokens": 32}
        )
        super().__init__(scheduler, trace, list(workers), seed=0)
        self.death = self.non_finite = 0.0
        self.releases = False
        self.step_s = {one.worker: seconds for one, seconds in workers.items()}

    def run(self) -> None:
        for event in self.script:
            self.tell(event)
        while self.started:
            ends = {name: at + self.num_steps(name) * self.step_s[name] for name, at in self.started.items()}
            name = min(ends, key=ends.__getitem__)
            self.at = ends[name]
            self.end_segment(name)


def makespan_s(policy: str, lengths: list[list[int]], workers: dict[WorkerJoined, float]) -> float:
    rollout = Clocked(policy, lengths, workers)
    rollout.run()
    assert driving.is_finished(rollout.scheduler)
    assert_samples_are_whole(rollout)
    found = schedule_metrics(rollout.records)
    assert found.makespan_s == rollout.at and found.useful_tokens == sum(map(sum, lengths))
    return found.makespan_s


def test_makespans_of_sync_and_adaptive_equal_hand_computed_times() -> None:
    alone = {driving.joined("w", "fast", 2): 1.0}
    # A batch waits for its longest sample; a queue does not.
    assert makespan_s("sync", [[200], [8], [8], [8]], alone) == 208
    assert makespan_s("adaptive", [[200], [8], [8], [8]], alone) == 200


def test_moving_long_samples_to_a_heavy_worker_halves_the_makespan() -> None:
    """Design note 1: one prompt of eight is long, and a heavy worker has few slots with fast steps."""
    lengths = [[320 if p == 0 else 16] * 4 for p in range(8)]
    workers = {driving.joined("fast", "fast", 8): 1.0, driving.joined("heavy", "heavy", 4): 0.25}
    in_batches = makespan_s("sync", lengths, workers)
    for policy in ("pdsr_v1", "pdsr_v2"):
        assert makespan_s(policy, lengths, workers) < in_batches / 2


# Metrics ---------------------------------------------------------------------------------------------------------


def handed_over() -> list[EventRecord]:
    """Returns the events of two samples, one of which trips the breaker of a worker that dies."""
    driven = driving.Driven(driving.make_scheduler("pdsr_v2", pdsr={"fast_limit_tokens": 10}))
    driven.join("fast", "fast", 1)
    driven.join("heavy", "heavy", 1)
    driven.submit(driving.samples(2, 1))
    driven.end("heavy", {"p1/s0": 4}, seconds=2.0)
    driven.end("fast", {"p0/s0": 10}, seconds=2.0)  # at 4
    driven.lose("fast")
    driven.end("heavy", {"p1/s0": 6}, finished=["p1/s0"], seconds=2.0)  # at 6
    driven.end("heavy", {"p0/s0": 15}, finished=["p0/s0"], seconds=4.0)  # at 10
    return driven.records


def test_schedule_metrics_and_spans_equal_hand_computed_values() -> None:
    found = schedule_metrics(handed_over())
    assert (found.makespan_s, found.repacked_tokens, found.truncated) == (10, 10, 0)
    # A slot counts while its worker is present: 4 s and 10 s.
    assert found.bubble == pytest.approx(1 - 10 / 14)
    assert found.tail_fraction == pytest.approx(1 - 6 / 10)
    assert (found.useful_tokens, found.segments, found.breaker_trips, found.suspensions) == (21, 4, 1, 1)
    # p0 becomes heavy when the breaker trips at 4, and p1 fast when its probe ends at 6.
    assert (found.threshold, found.heavy_share, found.last_verdict_s, found.last_verdict_tokens) == (None, 0.5, 6, 16)
    spans = [one for one in slot_spans(handed_over()) if one.uid == "p0/s0"]
    tracker = ScheduleMetricsTracker()
    for number, record in enumerate(handed_over()):
        if number == 8:
            first = tracker.take_window()
            assert (first.makespan_s, first.useful_tokens, first.segments) == (6, 16, 3)
            assert math.isnan(first.tail_fraction)
        tracker.add(record)
    second = tracker.take_window()
    assert (second.makespan_s, second.useful_tokens, second.segments) == (4, 5, 1)
    assert schedule_metrics(handed_over()[:2]).probe_recall is None
    assert spans[0] == Span("fast", 0, 2.0, 4.0, "probe", "p0/s0") and spans[-1].role == "heavy"


def test_schedule_metrics_of_turns_equal_hand_computed_values() -> None:
    driven = driving.Driven(driving.make_scheduler(history={"p0": 5}))

    def answered_at(at: float, num_tokens: int, finish: str | None = None) -> None:
        driven.at = at
        driven.answer("p0/s0", num_tokens, finish)

    driven.join("a", "heavy", 1)
    driven.submit(driving.samples(1, 1))
    driven.end("a", {"p0/s0": 4}, seconds=4.0)
    driven.end("a", {"p0/s0": 6}, acting=["p0/s0"], seconds=2.0)  # at 6
    answered_at(9.0, 16)
    driven.end("a", {"p0/s0": 17}, acting=["p0/s0"], seconds=1.0)  # at 10
    driven.lose("a")
    driven.at = 11.0
    driven.join("b", "fast", 1)
    answered_at(14.0, 20)
    driven.end("b", {"p0/s0": 21}, acting=["p0/s0"], seconds=1.0)  # at 15
    answered_at(20.0, 21, "stop")
    found = schedule_metrics(driven.records)
    assert (found.useful_tokens, found.repacked_tokens, found.suspensions) == (8, 20, 0)
    assert (found.makespan_s, found.stolen_by_heavy) == (20, 1), "a short sample began on a heavy worker"
    outside = [(one.start_s, one.end_s) for one in slot_spans(driven.records) if one.slot < 0]
    assert outside == [(6.0, 9.0), (10.0, 14.0)]
