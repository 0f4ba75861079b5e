"""Tests what each policy decides: which sample is admitted next, where and in which role, and which rows leave."""

from typing import Any

import pytest

from app.rollout.scheduling.sample_states import SampleState
from tests.rollout.scheduling.driving import Driven, admitted, make_scheduler, roles, samples, suspended


def driven_pair(policy: str, *, slots: int = 2, history: Any = None, finished: Any = (), **pdsr: Any) -> Driven:
    """Returns a fast and a heavy worker; the threshold needs as many finished samples as are given, or 30."""
    rules = {"window_min": len(finished) or 30} | pdsr
    driven = Driven(make_scheduler(policy, pdsr=rules, history=history, finished=finished))
    driven.join("fast", "fast", slots=slots)
    driven.join("heavy", "heavy", slots=slots)
    return driven


def test_sync_admits_no_sample_before_the_whole_batch_is_done() -> None:
    driven = Driven(make_scheduler("sync"))
    driven.join("w", slots=2)
    assert admitted(driven.submit(samples(3, 1))) == ["p0/s0", "p1/s0"]
    assert admitted(driven.end("w", {"p0/s0": 5, "p1/s0": 5}, finished=["p0/s0"])) == []
    assert admitted(driven.end("w", {"p1/s0": 9}, finished=["p1/s0"])) == ["p2/s0"]


# P-DSR v1 --------------------------------------------------------------------------------------------------------


def test_pdsr_v1_waits_for_every_probe_and_then_sends_the_longest_prompt_to_the_heavy_worker() -> None:
    driven = driven_pair("pdsr_v1", heavy_percent=30.0)
    assert roles(driven.submit(samples(2, 3))) == {"p0/s0": "probe", "p1/s0": "probe"}
    assert driven.rows("heavy") == []
    assert admitted(driven.end("fast", {"p0/s0": 5, "p1/s0": 5}, finished=["p0/s0"])) == []
    commands = driven.end("fast", {"p1/s0": 50}, finished=["p1/s0"])
    assert admitted(commands, "fast") == ["p0/s1", "p0/s2"]
    assert admitted(commands, "heavy") == ["p1/s1", "p1/s2"]


def test_pdsr_v1_moves_a_probe_at_its_limit_and_marks_its_prompt_heavy() -> None:
    driven = driven_pair("pdsr_v1", probe_limit_tokens=30, heavy_percent=1.0)
    driven.submit(samples(2, 2))
    assert driven.running["fast"].limits.length == 30, "the segment ends at the limit"
    commands = driven.end("fast", {"p0/s0": 30, "p1/s0": 20}, finished=["p1/s0"])
    assert suspended(commands) == [("p0/s0", "probe limit")]
    assert admitted(commands, "heavy") == ["p0/s0", "p0/s1"]
    assert admitted(commands, "fast") == ["p1/s1"]


@pytest.mark.parametrize(("choice", "state"), [("suspend", SampleState.RUNNING), ("truncate", SampleState.DONE)])
def test_pdsr_v1_moves_or_truncates_samples_at_the_fast_limit(choice: str, state: SampleState) -> None:
    driven = driven_pair("pdsr_v1", slots=1, fast_limit_tokens=50, on_fast_limit=choice, heavy_percent=1.0)
    driven.submit(samples(2, 2))
    driven.end("fast", {"p0/s0": 9}, finished=["p0/s0"])
    driven.end("fast", {"p1/s0": 5}, finished=["p1/s0"])
    assert (driven.rows("fast"), driven.rows("heavy")) == (["p1/s1"], ["p0/s1"])
    driven.end("heavy", {"p0/s1": 5}, finished=["p0/s1"])
    commands = driven.end("fast", {"p1/s1": 50})
    assert suspended(commands) == [("p1/s1", "breaker" if choice == "suspend" else "truncated")]
    sample = driven.scheduler.samples["p1/s1"]
    assert (sample.state, sample.num_tokens) == (state, 50)


def test_pdsr_v1_never_truncates_heavy_samples() -> None:
    driven = driven_pair("pdsr_v1", slots=1, fast_limit_tokens=50, on_fast_limit="truncate")
    driven.submit(samples(1, 2))
    assert admitted(driven.end("fast", {"p0/s0": 9}, finished=["p0/s0"]), "heavy") == ["p0/s1"]
    assert admitted(driven.lose("heavy"), "fast") == ["p0/s1"]
    driven.join("heavy#2", "heavy", slots=1)
    commands = driven.end("fast", {"p0/s1": 60})
    assert suspended(commands) == [("p0/s1", "breaker")] and admitted(commands, "heavy#2") == ["p0/s1"]


# P-DSR v2 --------------------------------------------------------------------------------------------------------


def test_pdsr_v2_classifies_a_probe_at_its_end_or_past_the_threshold() -> None:
    driven = driven_pair("pdsr_v2", slots=4, finished=[10, 20, 30, 40, 50])
    assert driven.scheduler.context.threshold == 40
    assert roles(driven.submit(samples(2, 2))) == {"p0/s0": "probe", "p1/s0": "probe"}
    assert driven.rows("fast") == ["p0/s0", "p1/s0"]
    commands = driven.end("fast", {"p0/s0": 15, "p1/s0": 64}, finished=["p0/s0"])
    assert roles(commands) == {"p0/s1": "fast", "p1/s1": "heavy"}
    assert admitted(commands, "fast") == ["p0/s1"] and admitted(commands, "heavy") == ["p1/s1"]


def test_pdsr_v2_gives_samples_to_any_worker_until_the_first_threshold() -> None:
    driven = driven_pair("pdsr_v2", slots=1, window_min=2, percentile=50.0)
    driven.submit(samples(2, 3))
    assert (driven.rows("fast"), driven.rows("heavy")) == (["p0/s0"], ["p1/s0"])
    assert roles(driven.end("fast", {"p0/s0": 3000}, finished=["p0/s0"])) == {"p0/s1": "fast"}
    commands = driven.end("heavy", {"p1/s0": 9}, finished=["p1/s0"])
    assert roles(commands) == {"p0/s2": "heavy"} and driven.scheduler.context.threshold == 9


def test_pdsr_v2_breaker_moves_the_sample_and_marks_its_prompt_heavy() -> None:
    driven = driven_pair("pdsr_v2", slots=1, fast_limit_tokens=50)
    driven.submit(samples(2, 4))
    assert (driven.rows("fast"), driven.rows("heavy")) == (["p0/s0"], ["p1/s0"])
    driven.end("fast", {"p0/s0": 5}, finished=["p0/s0"])
    assert driven.rows("fast") == ["p0/s1"]
    commands = driven.end("fast", {"p0/s1": 50})
    assert suspended(commands) == [("p0/s1", "breaker")]
    assert roles(commands) == {"p0/s2": "heavy"}, "heavy is full, so that fast steals, but not what just tripped"
    commands = driven.end("heavy", {"p1/s0": 9}, finished=["p1/s0"])
    assert roles(commands) == {"p0/s1": "heavy"}


def test_pdsr_v2_doubles_the_limit_with_every_move_up_to_max_moves() -> None:
    driven = driven_pair("pdsr_v2", slots=1, fast_limit_tokens=50)
    driven.submit(samples(2, 1))
    assert suspended(driven.end("fast", {"p0/s0": 50})) == [("p0/s0", "breaker")]
    assert driven.rows("fast") == ["p0/s0"], "heavy is full, so that fast steals it back"
    assert suspended(driven.end("fast", {"p0/s0": 99})) == []
    assert suspended(driven.end("fast", {"p0/s0": 100})) == [("p0/s0", "breaker")]
    assert driven.rows("fast") == []
    assert admitted(driven.end("heavy", {"p1/s0": 200}, finished=["p1/s0"]), "heavy") == ["p0/s0"]


@pytest.mark.parametrize(
    ("short_waits", "heavy_ends", "num_back"), [(False, False, 0), (True, False, 1), (False, True, 4)]
)
def test_pdsr_v2_returns_stolen_samples_only_if_needed(short_waits: bool, heavy_ends: bool, num_back: int) -> None:
    history = {f"p{i}": 90 for i in range(8)} | {"p8": 9}
    driven = driven_pair("pdsr_v2", slots=4, fast_limit_tokens=120, history=history, finished=[40])
    driven.submit(samples(8, 1), close=False)
    stolen = driven.rows("fast")
    driven.submit(samples(int(short_waits), 1, first=8))
    if heavy_ends:
        driven.end_all("heavy", 99, finished=4)
    assert driven.running["fast"].limits.length == 30
    commands = driven.end_all("fast", 30)
    assert suspended(commands) == [(uid, "steal limit") for uid in stolen[:num_back]]
    assert driven.rows("fast") == stolen[num_back:] + ["p8/s0"] * short_waits
    assert num_back or driven.running["fast"].limits.length == 30, "the time begins again"
    assert {driven.scheduler.samples[uid].moves for uid in stolen} == {0}, (
        "giving a sample back does not count as a move"
    )


def test_pdsr_v2_admits_probes_first_and_moves_every_row_at_the_fast_limit() -> None:
    driven = driven_pair("pdsr_v2", slots=1, history={"p0": 9}, finished=[40])
    driven.submit(samples(1, 3) + samples(1, 1, first=1))
    assert driven.rows("fast") == ["p1/s0"]
    driven = driven_pair("pdsr_v2", slots=16, fast_limit_tokens=50)
    driven.submit(samples(32, 1))
    assert len(suspended(driven.end_all("fast", 60))) == 16


def test_pdsr_limits_of_probes_breakers_and_stealing_may_be_in_seconds() -> None:
    driven = driven_pair("pdsr_v1", unit="seconds", fast_limit_s=6.0)
    driven.submit(samples(1, 2))
    assert suspended(driven.end("fast", {"p0/s0": 9}, seconds=2.0)) == []
    assert suspended(driven.end("fast", {"p0/s0": 12}, seconds=1.0)) == [("p0/s0", "probe limit")]
    driven = driven_pair("pdsr_v2", slots=1, unit="seconds", fast_limit_s=8.0)
    driven.submit(samples(2, 1), close=False)
    assert suspended(driven.end("fast", {"p0/s0": 9}, seconds=8.0)) == [("p0/s0", "breaker")]
    assert driven.rows("fast") == ["p0/s0"], "heavy is full, so that fast steals it back"
    driven.submit(samples(1, 1, first=2))
    assert suspended(driven.end("fast", {"p0/s0": 18}, seconds=1.5)) == []
    assert suspended(driven.end("fast", {"p0/s0": 21}, seconds=0.5)) == [("p0/s0", "steal limit")]


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_prompts_of_an_earlier_epoch_are_classified_without_a_probe(policy: str) -> None:
    driven = driven_pair(policy, slots=4, history={"p0": 5, "p1": 500}, finished=[10, 20, 30, 40, 50])
    commands = driven.submit(samples(3, 3))
    known = {f"p0/s{i}": "fast" for i in range(3)} | {f"p1/s{i}": "heavy" for i in range(3)}
    assert roles(commands) == known | {"p2/s0": "probe"}
    assert admitted(commands, "heavy") == ["p1/s0", "p1/s1", "p1/s2"]


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_a_second_step_starts_with_the_threshold_of_the_first(policy: str) -> None:
    rules = {"heavy_percent": 40.0, "percentile": 60.0 if policy == "pdsr_v2" else 1.0, "window_min": 5}
    driven = Driven(make_scheduler(policy, pdsr=rules, finished=[10, 20, 30, 40, 50]))
    assert driven.scheduler.context.threshold == 30
    driven.submit(samples(2, 2))
    driven.join("fast", "fast", slots=4)
    driven.join("heavy", "heavy", slots=4)
    assert driven.running["fast"].limits.length == 64, "held back samples wait for an early verdict"
    commands = driven.end("fast", {"p0/s0": 60, "p1/s0": 12}, finished=["p1/s0"])
    assert admitted(commands, "heavy") == ["p0/s1"] and admitted(commands, "fast") == ["p1/s1"]
    assert suspended(commands) == []


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_a_probe_that_outgrows_its_slot_moves_to_the_heavy_worker(policy: str) -> None:
    driven = Driven(make_scheduler(policy))
    driven.join("fast", "fast", slots=1, max_length=50)
    driven.join("heavy", "heavy", slots=2)
    driven.submit(samples(1, 2))
    driven.end("fast", {"p0/s0": 40})
    assert driven.rows("heavy") == ["p0/s0", "p0/s1"]


# Adaptive --------------------------------------------------------------------------------------------------------


def test_adaptive_probes_each_prompt_and_then_admits_the_longest() -> None:
    driven = Driven(make_scheduler("adaptive"))
    driven.join("w", slots=4)
    driven.submit(samples(3, 3))
    assert roles(driven.running.values()) == {"p0/s0": "probe", "p1/s0": "probe", "p2/s0": "probe", "p0/s1": "fast"}
    tokens = {"p0/s0": 5, "p1/s0": 64, "p2/s0": 9, "p0/s1": 3}
    assert admitted(driven.end("w", tokens, finished=["p0/s0"])) == ["p1/s1"], "a sibling of the longest"
    driven = Driven(make_scheduler("adaptive", history={"p0": 10, "p1": 500, "p2": 90}))
    driven.join("w", slots=3)
    assert admitted(driven.submit(samples(3, 1))) == ["p1/s0", "p2/s0", "p0/s0"], "by the history of prompts"


def test_adaptive_classifies_by_seconds_if_the_unit_is_seconds() -> None:
    rules = {"unit": "seconds", "window": 32, "window_min": 1, "percentile": 50}
    driven = Driven(make_scheduler("adaptive", pdsr=rules))
    driven.join("w", slots=2)
    driven.submit(samples(2, 3))
    # 100 tokens in 1 s: far below the threshold in seconds, whatever the number of tokens.
    commands = driven.end("w", {"p0/s0": 100, "p1/s0": 50}, finished=["p0/s0"], seconds=1.0)
    assert driven.scheduler.context.threshold == 1.0
    assert roles(commands) == {"p0/s1": "fast"}


def test_adaptive_starts_short_samples_before_all_long_ones_end() -> None:
    driven = Driven(make_scheduler("adaptive", history={"p0": 1} | {f"p{i}": 4000 for i in range(1, 400)}))
    driven.join("w", slots=1)
    driven.submit(samples(1, 2), close=False)
    order = []
    for i in range(1, 300):
        driven.submit(samples(1, 1, first=i), close=False)
        order += driven.rows("w")
        driven.end("w", {order[-1]: 10}, finished=order[-1:])
    assert "p0/s1" in order[1:], "a short sample waited for all long ones"


def test_adaptive_moves_rows_only_without_waiting_samples() -> None:
    history = {f"p{i}": 10 if i < 8 else 500 for i in range(20)}
    driven = driven_pair("adaptive", slots=4, history=history)
    driven.submit(samples(8, 1), close=False)
    driven.submit(samples(12, 1, first=8))
    before = driven.rows("fast")
    commands = driven.end("fast", {uid: 64 if uid == before[0] else 8 for uid in before})
    assert suspended(commands) == [] and driven.rows("fast") == before
    driven.lose("fast")
    assert admitted(driven.end_all("heavy", 10, finished=1), "heavy") == [before[0]]


@pytest.mark.parametrize(("moves", "num_left"), [(0, 2), (2, 4)])
def test_adaptive_spreads_the_last_rows_up_to_max_moves(moves: int, num_left: int) -> None:
    driven = driven_pair("adaptive", slots=4)
    driven.submit(samples(8, 1))
    for entry in driven.scheduler.samples:
        entry.moves = moves
    driven.end_all("heavy", 9, finished=4)
    commands = driven.end_all("fast", 64)
    assert {why for _, why in suspended(commands)} == ({"spread"} if num_left == 2 else set())
    assert (len(driven.rows("fast")), len(driven.rows("heavy"))) == (num_left, 4 - num_left)
