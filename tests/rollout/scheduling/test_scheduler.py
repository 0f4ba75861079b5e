import pytest

from app.rollout.scheduling.protocol import Released, RunSegment, Submitted, WorkerLost
from app.rollout.scheduling.sample_states import SampleState
from app.rollout.scheduling.scheduler import POLICIES
from app.rollout.scheduling.scheduling_policy import WorkerState
from tests.rollout.scheduling.driving import Driven, admitted, make_scheduler, probes_of, samples
from tests.rollout.scheduling.invariants import check_invariants, is_finished
from tests.rollout.scheduling.storms import storm


def test_one_sample_from_submission_to_the_end() -> None:
    driven = Driven(make_scheduler())
    assert driven.join("w") == []
    (run,) = driven.submit(samples(1, 1))
    assert isinstance(run, RunSegment)
    assert (run.worker, run.admit[0].uid, run.admit[0].how, run.admit[0].role) == ("w", "p0/s0", "recompute", "probe")
    (run,) = driven.end("w", {"p0/s0": 64})
    assert isinstance(run, RunSegment) and run.admit == () and driven.scheduler.samples["p0/s0"].num_tokens == 64
    assert driven.end("w", {"p0/s0": 70}, finished=("p0/s0",)) == []
    assert driven.scheduler.samples["p0/s0"].finish == "stop"
    assert is_finished(driven.scheduler)


def test_samples_that_were_taken_are_forgotten_and_their_prompt_becomes_history() -> None:
    driven = Driven(make_scheduler("pdsr_v2"))
    driven.join("w", slots=4)
    driven.submit(samples(1, 2), close=False)
    driven.end("w", {"p0/s0": 5}, finished=("p0/s0",))
    driven.end("w", {"p0/s1": 9})
    driven.tell(Released(driven.at, ("p0/s0",)))
    table, lengths = driven.scheduler.samples, driven.scheduler.context.lengths
    assert [entry.uid for entry in table] == ["p0/s1"], "the other one still runs"
    assert "p0" not in lengths.history and probes_of(driven).verdicts == {"p0": "fast"}
    driven.end("w", {"p0/s1": 12}, finished=("p0/s1",))
    driven.tell(Released(driven.at, ("p0/s1",)))
    assert not list(table) and lengths.history == {"p0": 12} and lengths.group_max == {}
    probes = probes_of(driven)
    assert (probes.probe_uids, probes.verdicts, probes.held_back) == ({}, {}, {})
    (run,) = driven.submit(samples(1, 1))
    assert isinstance(run, RunSegment) and run.admit[0].role == "probe"
    assert table["p0/s0"].number == 2, "numbers are never given twice"


def test_samples_are_dealt_evenly_to_idle_workers() -> None:
    driven = Driven(make_scheduler())
    driven.join("a", slots=8)
    driven.join("b", slots=8)
    driven.submit(samples(6, 1))
    assert (len(driven.rows("a")), len(driven.rows("b"))) == (3, 3)


def test_a_freed_slot_is_refilled_at_the_next_edge() -> None:
    driven = Driven(make_scheduler())
    driven.join("w", slots=2)
    driven.submit(samples(3, 1))
    commands = driven.end("w", {"p0/s0": 5, "p1/s0": 5}, finished=("p0/s0",))
    assert admitted(commands) == ["p2/s0"]
    assert driven.rows("w") == ["p1/s0", "p2/s0"]


def test_a_lost_workers_rows_go_on_elsewhere() -> None:
    driven = Driven(make_scheduler())
    driven.join("a", slots=1)
    driven.submit(samples(1, 1))
    driven.end("a", {"p0/s0": 64})
    driven.join("b", slots=1)
    (run,) = driven.tell(WorkerLost(9.0, "a"))
    assert isinstance(run, RunSegment) and run.worker == "b"
    assert (run.admit[0].num_tokens, run.admit[0].how) == (64, "recompute")
    assert driven.scheduler.samples["p0/s0"].state is SampleState.RUNNING


def test_a_kept_cache_is_copied_and_forgotten_with_its_worker() -> None:
    scheduler = make_scheduler("pdsr_v2", pdsr={"fast_limit_tokens": 10, "window_min": 1})
    driven = Driven(scheduler)
    driven.join("f", "fast", slots=1)
    driven.join("h", "heavy", slots=1)
    driven.submit(samples(3, 1))
    driven.end("f", {"p0/s0": 10})
    assert scheduler.samples["p0/s0"].held_by == "f"
    commands = driven.end("h", {"p1/s0": 3}, finished=("p1/s0",))
    (run,) = [one for one in commands if isinstance(one, RunSegment)]
    assert (run.admit[0].uid, run.admit[0].how) == ("p0/s0", "copy")


def test_a_cache_that_its_worker_does_not_keep_is_computed_again() -> None:
    driven = Driven(make_scheduler("pdsr_v2", pdsr={"fast_limit_tokens": 10}))
    driven.join("f", "fast", slots=1, keeps_caches=False)
    driven.submit(samples(2, 1))
    driven.join("h", "heavy", slots=1)
    driven.end("h", {"p1/s0": 3}, finished=("p1/s0",))
    commands = driven.end("f", {"p0/s0": 10})
    (run,) = [one for one in commands if isinstance(one, RunSegment)]
    assert (run.worker, run.admit[0].uid, run.admit[0].how) == ("h", "p0/s0", "recompute")


def test_a_segment_waits_for_slots_that_are_wanted_and_for_smaller_programs_when_none_is() -> None:
    driven = Driven(make_scheduler(segment={"min": 10, "max": 500}))
    driven.join("w", slots=4, rungs=(2,), capacity=1000)
    (run, *_) = driven.submit(samples(5, 1), close=False)
    assert isinstance(run, RunSegment)
    assert (run.limits.leave_when_finished, run.limits.leave_when_active) == (1, 0)
    rows = {f"p{i}/s0": 5 for i in range(4)}
    driven.end("w", rows, finished=("p0/s0",))
    driven.submit((), close=True)
    (run,) = driven.end("w", {f"p{i}/s0": 9 for i in (1, 2, 3, 4)})
    assert isinstance(run, RunSegment)
    assert (run.limits.leave_when_finished, run.limits.leave_when_active, run.limits.length) == (0, 2, 250)


def test_a_segment_does_not_leave_for_samples_that_wait_for_a_verdict() -> None:
    driven = Driven(make_scheduler("pdsr_v1", segment={"min": 10, "max": 500}))
    driven.join("w", slots=4, rungs=(2,), capacity=1000)
    driven.submit(samples(4, 3))
    assert driven.scheduler.samples.num_waiting == 8
    probes = {f"p{i}/s0": 5 for i in range(4)}
    (run,) = driven.end("w", probes)
    assert isinstance(run, RunSegment)
    assert run.limits == (250, 0, 2)
    (run,) = driven.end("w", dict.fromkeys(probes, 9), finished=("p0/s0", "p1/s0", "p2/s0", "p3/s0"))
    assert isinstance(run, RunSegment) and len(run.admit) == 4
    assert run.limits.leave_when_finished > 0 and run.limits.leave_when_active == 0


def test_samples_held_back_by_v2_wait_for_the_end_of_a_probe_and_for_free_slots_of_all_workers() -> None:
    """Eight prompts of eight samples on 8 + 8 slots: without this, no worker would look up for 1,024 tokens."""
    driven = Driven(make_scheduler("pdsr_v2"))
    driven.submit(samples(8, 8))
    driven.join("fast", "fast", slots=8, rungs=(4,))
    driven.join("heavy", "heavy", slots=8, rungs=(4,))
    assert len(driven.rows("fast")) == 8 and not driven.rows("heavy")
    run = driven.running["fast"]
    assert run.limits == (64, 1, 0)
    driven.end("fast", {f"p{i}/s0": 40 for i in range(8)}, finished=("p3/s0",))
    assert (len(driven.rows("fast")), len(driven.rows("heavy"))) == (8, 6)
    run = driven.running["heavy"]
    assert run.limits == (64, 1, 0), "two slots are free"


def test_a_limit_in_seconds_ends_a_segment_by_the_steps_that_it_takes() -> None:
    rules = {"unit": "seconds", "fast_limit_s": 10.0, "window_min": 30}
    driven = Driven(make_scheduler("pdsr_v2", pdsr=rules))
    driven.submit(samples(3, 1))
    driven.join("heavy", "heavy", slots=1)
    driven.join("fast", "fast", slots=2, capacity=4000)
    assert driven.running["fast"].limits.length == 64, "nobody knows how long a step takes"
    driven.end("fast", {"p1/s0": 64, "p2/s0": 32}, seconds=4.0)
    entries = driven.scheduler.samples
    assert (entries["p1/s0"].seconds, entries["p2/s0"].seconds) == (4.0, 2.0)
    assert driven.running["fast"].limits.length == 96, "the first of them has 6 s left, at 1/16 s a step"


def test_submitting_after_closing_is_a_bug() -> None:
    driven = Driven(make_scheduler())
    driven.submit(samples(1, 1))
    with pytest.raises(AssertionError, match="Closed"):
        driven.scheduler.handle(Submitted(0.0, samples(1, 1, first=5)))


def test_nothing_submitted_is_finished_when_closed() -> None:
    driven = Driven(make_scheduler())
    assert driven.submit(()) == [] and is_finished(driven.scheduler)


def test_work_arriving_later_wakes_idle_workers() -> None:
    driven = Driven(make_scheduler())
    driven.join("w")
    driven.submit(samples(1, 1), close=False)
    assert driven.end("w", {"p0/s0": 5}, finished=("p0/s0",)) == []
    assert admitted(driven.submit(samples(1, 1, first=1))) == ["p1/s0"]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_events_have_the_same_commands(policy: str) -> None:
    seeds = [seed for seed in range(120) if storm(seed).scheduler.policy.name == policy][:8]
    for seed in seeds:
        scheduler = storm(seed).scheduler
        for event, commands in storm(seed).run():
            assert tuple(scheduler.handle(event)) == commands, f"seed {seed}"


def test_the_check_sees_an_idle_slot_beside_work() -> None:
    driven = Driven(make_scheduler())
    driven.join("w", slots=2)
    driven.submit(samples(1, 1))
    driven.scheduler.context.workers["w"].is_busy = False
    with pytest.raises(AssertionError):
        check_invariants(driven.scheduler)


def test_the_check_sees_a_sample_that_nobody_holds() -> None:
    driven = Driven(make_scheduler())
    driven.submit(samples(2, 1))
    driven.scheduler.policy.next_sample(WorkerState("w", "heavy", 1, (), None, 8192, None, True, 0))
    with pytest.raises(AssertionError):
        check_invariants(driven.scheduler)
