from typing import Any

import pytest

from app.rollout.scheduling.protocol import RunSegment, WorkerLost
from app.rollout.scheduling.sample_states import SampleState
from tests.rollout.scheduling.driving import Driven, admitted, make_scheduler, probes_of, samples
from tests.rollout.scheduling.invariants import is_finished


def worker_with(
    num_samples: int, *, slots: int = 2, capacity: int = 8192, policy: str = "adaptive", **more: Any
) -> Driven:
    """Returns a scheduler with these samples, one of each prompt, on one worker."""
    driven = Driven(make_scheduler(policy, **more))
    driven.join("w", slots=slots, capacity=capacity)
    driven.submit(samples(num_samples, 1))
    return driven


def last_run(driven: Driven) -> RunSegment:
    (run,) = [one for one in driven.last if isinstance(one, RunSegment)]
    return run


def test_a_row_that_acts_leaves_its_slot_and_goes_back_before_other_samples() -> None:
    driven = worker_with(4)
    [run] = driven.end("w", {"p0/s0": 5, "p1/s0": 5}, acting=("p0/s0",))
    assert admitted([run]) == ["p2/s0"]
    driven.end("w", {"p1/s0": 9, "p2/s0": 4}, acting=("p1/s0",))
    assert driven.rows("w") == ["p2/s0", "p3/s0"], "two slots, and two rows that act"
    assert driven.answer("p1/s0", 12) == driven.answer("p0/s0", 8) == [], "no slot is free"
    driven.end("w", {"p2/s0": 8, "p3/s0": 4}, finished=("p2/s0", "p3/s0"))
    admits = last_run(driven).admit
    assert [(one.uid, one.num_tokens, one.how) for one in admits] == [
        ("p1/s0", 12, "resume"),
        ("p0/s0", 8, "resume"),
    ], "in the order of their answers"


def test_segments_of_turns_end_early_under_every_schedule() -> None:
    for policy in ("sync", "adaptive"):
        assert worker_with(4, policy=policy, has_turns=True).running["w"].limits.leave_when_finished
    assert not worker_with(4, policy="sync").running["w"].limits.leave_when_finished


def test_a_worker_whose_rows_all_act_gets_nothing_until_an_answer() -> None:
    driven = worker_with(2)
    assert driven.end("w", {"p0/s0": 5, "p1/s0": 5}, acting=("p0/s0", "p1/s0")) == []
    scheduler = driven.scheduler
    assert not (scheduler.is_stuck or is_finished(scheduler)) and scheduler.samples.num_waiting == 0
    assert admitted(driven.answer("p1/s0", 9)) == ["p1/s0"]


@pytest.mark.parametrize("finish", ["stop", "length", "dropped:timeout"])
def test_an_answer_may_end_the_sample(finish: str) -> None:
    driven = worker_with(1)
    driven.end("w", {"p0/s0": 5}, acting=("p0/s0",))
    assert driven.answer("p0/s0", 7, finish) == []
    is_dropped = finish.startswith("dropped")
    assert driven.scheduler.samples["p0/s0"].state == (SampleState.DROPPED if is_dropped else SampleState.DONE)
    lengths = driven.scheduler.context.lengths
    assert [one.num_tokens for one in lengths.finished] == ([] if is_dropped else [7]), "observations count"


def test_rows_that_act_lose_their_cache_with_its_worker_and_go_on_elsewhere() -> None:
    driven = worker_with(3, slots=3)
    rows = {f"p{i}/s0": 5 for i in range(3)}
    driven.end("w", rows, acting=("p0/s0", "p1/s0"))
    driven.answer("p1/s0", 8)
    assert driven.tell(WorkerLost(1.0, "w")) == []
    table = driven.scheduler.samples
    assert [table[uid].state for uid in rows] == [SampleState.ACTING, SampleState.SUSPENDED, SampleState.SUSPENDED]
    assert [table[uid].held_by for uid in rows] == [None] * 3
    driven.join("v", slots=3)
    assert {(one.uid, one.num_tokens, one.how) for one in last_run(driven).admit} == {
        ("p1/s0", 8, "recompute"),
        ("p2/s0", 5, "recompute"),
    }
    driven.answer("p0/s0", 9)
    driven.end("v", {"p1/s0": 9, "p2/s0": 9})
    assert [(one.uid, one.how) for one in last_run(driven).admit] == [("p0/s0", "recompute")]


def test_a_row_that_its_answer_makes_too_long_goes_on_where_it_fits() -> None:
    driven = Driven(make_scheduler())
    driven.join("short", slots=1, max_length=20)
    driven.submit(samples(1, 1))
    driven.join("long", "heavy", slots=1)
    driven.end("short", {"p0/s0": 5}, acting=("p0/s0",))
    run = driven.answer("p0/s0", 10)[0]  # its prompt has 10 tokens
    assert isinstance(run, RunSegment) and run.worker == "long"
    assert [one.how for one in run.admit] == ["recompute"]


@pytest.mark.parametrize(("max_suspended", "num_begun"), [(0, 2), (1, 3), (None, 10), (7, 9)])
def test_no_more_samples_begin_than_may_be_suspended(max_suspended: int | None, num_begun: int) -> None:
    driven = worker_with(20, max_suspended=max_suspended)
    begun = driven.rows("w")
    while rows := driven.rows("w"):
        driven.end("w", dict.fromkeys(rows, 5), acting=tuple(rows))
        begun += driven.rows("w")
    assert len(begun) == num_begun and not driven.scheduler.is_stuck
    driven.answer(begun[-1], 8)
    assert driven.rows("w") == [begun[-1]]
    driven.answer(begun[0], 8, "stop")
    driven.end("w", {begun[-1]: 9}, acting=(begun[-1],))
    assert len(driven.rows("w")) == 1, "another one for the one that has ended"


@pytest.mark.parametrize("knows_at_once", [True, False])
def test_segments_end_early_where_turns_end(knows_at_once: bool) -> None:
    segment = {"min": 10, "max": 9000}
    driven = worker_with(3, slots=3, capacity=9000, segment=segment, has_turns=knows_at_once)
    driven.end("w", {f"p{i}/s0": 5 for i in range(3)})
    run = last_run(driven)
    early = (32 if knows_at_once else 3000, 1 if knows_at_once else 0)
    assert (run.limits.length, run.limits.leave_when_finished) == early
    driven.end("w", {f"p{i}/s0": 9 for i in range(3)}, acting=("p1/s0",))
    assert (last_run(driven).limits.length, last_run(driven).limits.leave_when_finished) == (32, 1), (
        "another turn may end"
    )


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_siblings_are_held_back_while_the_probe_acts(policy: str) -> None:
    driven = Driven(make_scheduler(policy))
    driven.join("w", slots=4)
    driven.submit(samples(1, 3))
    driven.end("w", {"p0/s0": 5}, acting=("p0/s0",))
    assert driven.rows("w") == [] and not driven.scheduler.is_stuck
    assert probes_of(driven).held_back == {"p0": ["p0/s1", "p0/s2"]}
    driven.answer("p0/s0", 8)
    assert last_run(driven).admit[0].role == "probe"
    assert admitted(driven.end("w", {"p0/s0": 9}, finished=("p0/s0",))) == ["p0/s1", "p0/s2"]


def test_a_probe_that_its_environment_ends_gives_the_verdict() -> None:
    driven = Driven(make_scheduler("pdsr_v2"))
    driven.join("w", slots=4)
    driven.submit(samples(1, 3))
    driven.end("w", {"p0/s0": 5}, acting=("p0/s0",))
    assert admitted(driven.answer("p0/s0", 5, "stop")) == ["p0/s1", "p0/s2"]


def test_sync_begins_nothing_while_rows_of_a_batch_act() -> None:
    driven = worker_with(4, policy="sync")
    driven.end("w", {"p0/s0": 5, "p1/s0": 5}, acting=("p0/s0",), finished=("p1/s0",))
    assert driven.rows("w") == []
    assert admitted(driven.answer("p0/s0", 8)) == ["p0/s0"]
    assert admitted(driven.end("w", {"p0/s0": 9}, finished=("p0/s0",))) == ["p2/s0", "p3/s0"]


def test_rows_that_act_count_as_unfinished_in_the_threshold() -> None:
    driven = worker_with(3, slots=3, pdsr={"window_min": 3}, finished=(10, 20, 30))
    assert driven.scheduler.context.threshold == 30
    driven.end("w", {"p0/s0": 100, "p1/s0": 100, "p2/s0": 5}, acting=("p0/s0", "p1/s0"))
    driven.end("w", {"p2/s0": 25}, finished=("p2/s0",))
    # Three of seven samples are longer than 25, and two of them nobody knows how long.
    assert driven.scheduler.context.threshold is None


def test_samples_are_dealt_evenly_with_regard_to_rows_that_come_back() -> None:
    driven = Driven(make_scheduler())
    driven.join("a", slots=4)
    driven.join("b", slots=4)
    driven.submit(samples(4, 1), close=False)
    rows = driven.rows("a")
    driven.end("a", dict.fromkeys(rows, 5), acting=tuple(rows))
    driven.end("b", dict.fromkeys(driven.rows("b"), 5), finished=tuple(driven.rows("b")))
    assert len(admitted(driven.submit(samples(2, 1, first=4)), "b")) == 2


def test_rows_spread_to_no_worker_that_others_come_back_to() -> None:
    driven = Driven(make_scheduler())
    driven.join("a", slots=4)
    driven.join("b", slots=4)
    driven.submit(samples(6, 1))
    rows = driven.rows("b")
    driven.end("b", dict.fromkeys(rows, 5), acting=tuple(rows[:1]), finished=tuple(rows[1:]))
    driven.end("a", dict.fromkeys(driven.rows("a"), 5))
    assert len(driven.rows("a")) == 3 and driven.rows("b") == []
    driven.answer(rows[0], 8, "stop")
    driven.end("a", dict.fromkeys(driven.rows("a"), 9))
    assert len(driven.rows("b")) == 1
