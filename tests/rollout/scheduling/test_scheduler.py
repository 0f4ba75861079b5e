"""Tests the scheduler under any policy: samples are admitted, moved, lost and released, and act between turns."""

from collections.abc import Sequence
from typing import Any

import pytest

from app.rollout.scheduling.protocol import Command, Released, RunSegment
from app.rollout.scheduling.sample_states import SampleState
from tests.rollout.scheduling.driving import Driven, admitted, is_finished, make_scheduler, roles, samples


def hows(commands: Sequence[Command]) -> list[tuple[str, int, str]]:
    runs = (one for one in commands if isinstance(one, RunSegment))
    return [(one.uid, one.num_tokens, one.how) for run in runs for one in run.admit]


def test_released_samples_are_forgotten_and_their_prompt_becomes_history() -> None:
    driven = Driven(make_scheduler("pdsr_v2"))
    driven.join("w", slots=4)
    driven.submit(samples(1, 2), close=False)
    driven.end("w", {"p0/s0": 5}, finished=["p0/s0"])
    driven.end("w", {"p0/s1": 9})
    table, lengths = driven.scheduler.samples, driven.scheduler.context.lengths
    driven.tell(Released(driven.at, ("p0/s0",)))
    assert [entry.uid for entry in table] == ["p0/s1"] and "p0" not in lengths.history, "the other one still runs"
    driven.end("w", {"p0/s1": 12}, finished=["p0/s1"])
    driven.tell(Released(driven.at, ("p0/s1",)))
    assert not list(table) and lengths.history == {"p0": 12} and lengths.group_max == {}
    assert roles(driven.submit(samples(1, 1))) == {"p0/s0": "probe"}, "the verdict is forgotten as well"
    assert table["p0/s0"].number == 2, "numbers are never reused"


def test_samples_are_distributed_evenly_and_refill_free_slots() -> None:
    driven = Driven(make_scheduler())
    for worker in ("a", "b"):
        driven.join(worker, slots=3)
    driven.submit(samples(4, 1), close=False)
    assert (len(driven.rows("a")), len(driven.rows("b"))) == (2, 2)
    driven.submit(samples(2, 1, first=4))
    first, second = driven.rows("a")
    commands = driven.end("a", {first: 5, second: 5}, finished=[first])
    assert admitted(commands) == ["p4/s0", "p5/s0"] and driven.rows("a") == [second, "p4/s0", "p5/s0"]
    driven = Driven(make_scheduler())
    driven.join("w")
    driven.submit(samples(1, 1), close=False)
    assert driven.end("w", {"p0/s0": 5}, finished=["p0/s0"]) == [] and not is_finished(driven.scheduler)
    assert admitted(driven.submit(samples(1, 1, first=1))) == ["p1/s0"]


@pytest.mark.parametrize(
    ("keeps_caches", "is_lost", "how"), [(True, False, "copy"), (True, True, "recompute"), (False, False, "recompute")]
)
def test_a_moved_row_is_copied_if_its_worker_keeps_the_cache_and_recomputed_otherwise(
    keeps_caches: bool, is_lost: bool, how: str
) -> None:
    driven = Driven(make_scheduler("pdsr_v2", pdsr={"fast_limit_tokens": 10}))
    driven.join("f", "fast", slots=1, keeps_caches=keeps_caches)
    driven.join("h", "heavy", slots=1)
    driven.submit(samples(3, 1))
    driven.end("f", {"p0/s0": 10})
    if is_lost:
        driven.lose("f")
    commands = driven.end("h", {"p1/s0": 3}, finished=["p1/s0"])
    admits = [one for run in commands if isinstance(run, RunSegment) and run.worker == "h" for one in run.admit]
    assert ("p0/s0", 10, how) in [(one.uid, one.num_tokens, one.how) for one in admits]


def test_a_segment_ends_when_waiting_samples_can_use_slots_or_a_smaller_program_fits() -> None:
    driven = Driven(make_scheduler(segment={"min": 10, "max": 500}))
    driven.join("w", slots=4, rungs=(2,), capacity=1000)
    driven.submit(samples(5, 1))
    limits = driven.running["w"].limits
    assert (limits.leave_when_finished, limits.leave_when_active) == (1, 0)
    driven.end_all("w", 5, finished=1)
    driven.end_all("w", 9)
    limits = driven.running["w"].limits
    assert (limits.leave_when_finished, limits.leave_when_active, limits.length) == (0, 2, 250)


def test_free_slots_wait_for_siblings_of_a_probe_only_if_its_verdict_is_near() -> None:
    driven = Driven(make_scheduler("pdsr_v1", segment={"min": 10, "max": 500}))
    driven.join("w", slots=4, rungs=(2,), capacity=1000)
    driven.submit(samples(4, 3))
    assert driven.scheduler.samples.num_waiting == 8
    driven.end_all("w", 5)
    assert driven.running["w"].limits == (250, 0, 2)
    assert len(admitted(driven.end_all("w", 9, finished=4))) == 4
    limits = driven.running["w"].limits
    assert limits.leave_when_finished > 0 and limits.leave_when_active == 0
    # v2 releases them at the end of any probe, and then free slots of all workers wait for them.
    driven = Driven(make_scheduler("pdsr_v2"))
    driven.submit(samples(8, 8))
    driven.join("fast", "fast", slots=8, rungs=(4,))
    driven.join("heavy", "heavy", slots=8, rungs=(4,))
    assert len(driven.rows("fast")) == 8 and not driven.rows("heavy") and driven.running["fast"].limits == (64, 1, 0)
    driven.end_all("fast", 40, finished=1)
    assert (len(driven.rows("fast")), len(driven.rows("heavy"))) == (8, 6)
    assert driven.running["heavy"].limits == (64, 1, 0)


def test_a_limit_in_seconds_sets_the_segment_length_by_the_measured_step_time() -> None:
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


# Turns -----------------------------------------------------------------------------------------------------------


def worker_with(
    num_samples: int, *, slots: int = 2, capacity: int = 8192, policy: str = "adaptive", **more: Any
) -> Driven:
    """Returns a scheduler with these samples, one of each prompt, on one worker."""
    driven = Driven(make_scheduler(policy, **more))
    driven.join("w", slots=slots, capacity=capacity)
    driven.submit(samples(num_samples, 1))
    return driven


def test_a_row_waiting_for_its_environment_frees_its_slot_and_resumes_first() -> None:
    driven = worker_with(5)
    assert admitted(driven.end("w", {"p0/s0": 5, "p1/s0": 5}, acting=["p0/s0"])) == ["p2/s0"]
    driven.end("w", {"p1/s0": 9, "p2/s0": 4}, acting=["p1/s0"])
    assert driven.rows("w") == ["p2/s0", "p3/s0"], "two slots, and two rows that act"
    assert driven.answer("p1/s0", 12) == driven.answer("p0/s0", 8) == [], "no slot is free"
    commands = driven.end("w", {"p2/s0": 8, "p3/s0": 4}, finished=["p2/s0", "p3/s0"])
    assert hows(commands) == [("p1/s0", 12, "resume"), ("p0/s0", 8, "resume")], "in the order of their answers"
    with pytest.raises(AssertionError, match="waits for no answer"):
        driven.answer("p1/s0", 14)


@pytest.mark.parametrize(("finish", "known"), [("stop", [7]), ("dropped:timeout", [])])
def test_an_episode_can_end_with_an_answer_of_the_environment(finish: str, known: list[int]) -> None:
    driven = worker_with(1)
    driven.end("w", {"p0/s0": 5}, acting=["p0/s0"])
    assert driven.answer("p0/s0", 7, finish) == []
    assert driven.scheduler.samples["p0/s0"].state == (SampleState.DONE if known else SampleState.DROPPED)
    lengths = driven.scheduler.context.lengths
    assert [one.num_tokens for one in lengths.finished] == known, "observations count"


def test_rows_that_wait_for_environments_continue_after_their_worker_is_lost() -> None:
    driven = worker_with(3, slots=3)
    rows = {f"p{i}/s0": 5 for i in range(3)}
    driven.end("w", rows, acting=["p0/s0", "p1/s0"])
    driven.answer("p1/s0", 8)
    assert driven.lose("w") == []
    table = driven.scheduler.samples
    assert [table[uid].state for uid in rows] == [SampleState.ACTING, SampleState.SUSPENDED, SampleState.SUSPENDED]
    assert [table[uid].held_by for uid in rows] == [None] * 3
    assert set(hows(driven.join("v", slots=3))) == {("p1/s0", 8, "recompute"), ("p2/s0", 5, "recompute")}
    driven.answer("p0/s0", 9)
    assert hows(driven.end("v", {"p1/s0": 9, "p2/s0": 9})) == [("p0/s0", 9, "recompute")]


def test_a_row_too_long_for_its_slot_after_an_answer_continues_on_a_longer_slot() -> None:
    driven = Driven(make_scheduler())
    driven.join("short", slots=1, max_length=20)
    driven.submit(samples(1, 1))
    driven.join("long", "heavy", slots=1)
    driven.end("short", {"p0/s0": 5}, acting=["p0/s0"])
    commands = driven.answer("p0/s0", 10)  # its prompt has 10 tokens
    assert hows(commands) == [("p0/s0", 10, "recompute")] and driven.rows("long") == ["p0/s0"]


@pytest.mark.parametrize(("max_suspended", "num_begun"), [(0, 2), (1, 3), (None, 10), (7, 9)])
def test_new_samples_are_limited_by_max_suspended(max_suspended: int | None, num_begun: int) -> None:
    driven = worker_with(20, max_suspended=max_suspended)
    begun = driven.rows("w")
    while rows := driven.rows("w"):
        driven.end_all("w", 5, acting=rows)
        begun += driven.rows("w")
    assert len(begun) == num_begun and not driven.scheduler.is_stuck
    driven.answer(begun[-1], 8)
    assert driven.rows("w") == [begun[-1]]
    driven.answer(begun[0], 8, "stop")
    driven.end("w", {begun[-1]: 9}, acting=[begun[-1]])
    assert len(driven.rows("w")) == 1, "a new sample starts for the one that ended"


@pytest.mark.parametrize("knows_at_once", [True, False])
def test_decode_segments_end_early_if_a_turn_may_end(knows_at_once: bool) -> None:
    segment = {"min": 10, "max": 9000}
    driven = worker_with(3, slots=3, capacity=9000, segment=segment, has_turns=knows_at_once)
    driven.end_all("w", 5)
    assert driven.running["w"].limits[:2] == ((32, 1) if knows_at_once else (3000, 0))
    driven.end_all("w", 9, acting=["p1/s0"])
    assert driven.running["w"].limits[:2] == (32, 1), "another turn may end"
    for has_turns in (True, False):
        limits = worker_with(4, policy="sync", has_turns=has_turns).running["w"].limits
        assert (limits.leave_when_finished > 0) == has_turns, "under every policy"


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_siblings_are_held_back_while_their_probe_waits_for_its_environment(policy: str) -> None:
    driven = Driven(make_scheduler(policy))
    driven.join("w", slots=4)
    driven.submit(samples(1, 3))
    driven.end("w", {"p0/s0": 5}, acting=["p0/s0"])
    assert driven.rows("w") == [] and not driven.scheduler.is_stuck
    assert roles(driven.answer("p0/s0", 8)) == {"p0/s0": "probe"}
    driven.end("w", {"p0/s0": 9}, acting=["p0/s0"])
    assert admitted(driven.answer("p0/s0", 9, "stop")) == ["p0/s1", "p0/s2"], "the answer also gives the verdict"


def test_sync_starts_no_samples_while_rows_of_the_batch_wait_for_their_environment() -> None:
    driven = worker_with(4, policy="sync")
    driven.end("w", {"p0/s0": 5, "p1/s0": 5}, acting=["p0/s0"], finished=["p1/s0"])
    assert driven.rows("w") == []
    assert admitted(driven.answer("p0/s0", 8)) == ["p0/s0"]
    assert admitted(driven.end("w", {"p0/s0": 9}, finished=["p0/s0"])) == ["p2/s0", "p3/s0"]


def test_rows_that_wait_for_environments_count_as_unfinished_in_the_threshold() -> None:
    driven = worker_with(3, slots=3, pdsr={"window_min": 3}, finished=(10, 20, 30))
    assert driven.scheduler.context.threshold == 30
    driven.end("w", {"p0/s0": 100, "p1/s0": 100, "p2/s0": 5}, acting=["p0/s0", "p1/s0"])
    driven.end("w", {"p2/s0": 25}, finished=["p2/s0"])
    # Three of seven samples are longer than 25, two of them of unknown length.
    assert driven.scheduler.context.threshold is None


def test_rows_are_not_moved_to_a_worker_whose_rows_wait_for_environments() -> None:
    driven = Driven(make_scheduler())
    driven.join("a", slots=4)
    driven.join("b", slots=4)
    driven.submit(samples(6, 1))
    rows = driven.rows("b")
    driven.end("b", dict.fromkeys(rows, 5), rows[1:], acting=rows[:1])
    driven.end_all("a", 5)
    assert len(driven.rows("a")) == 3 and driven.rows("b") == [], "another row comes back there"
    driven.answer(rows[0], 8, "stop")
    driven.end_all("a", 9)
    assert len(driven.rows("b")) == 1
