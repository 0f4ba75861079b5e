import pytest

from app.rollout.scheduling.protocol import RunSegment, WorkerLost
from app.rollout.scheduling.sample_states import SampleState
from app.rollout.scheduling.scheduler import POLICIES
from tests.rollout.scheduling.driving import Driven, admitted, make_scheduler, probes_of, samples, suspended
from tests.rollout.scheduling.invariants import is_finished


def driven_pair(policy: str, *, slots: int = 2, history=None, finished=(), **pdsr) -> Driven:
    rules = {"window_min": 30 if not finished else len(finished)} | pdsr
    driven = Driven(make_scheduler(policy, pdsr=rules, history=history, finished=finished))
    driven.join("fast", "fast", slots=slots)
    driven.join("heavy", "heavy", slots=slots)
    return driven


def roles(commands) -> dict[str, str]:
    return {one.uid: one.role for run in commands if isinstance(run, RunSegment) for one in run.admit}


def test_sync_takes_nothing_before_the_last_of_a_batch_is_done() -> None:
    driven = Driven(make_scheduler("sync"))
    driven.join("w", slots=2)
    assert admitted(driven.submit(samples(3, 1))) == ["p0/s0", "p1/s0"]
    commands = driven.end("w", {"p0/s0": 5, "p1/s0": 5}, finished=("p0/s0",))
    assert admitted(commands) == []
    assert admitted(driven.end("w", {"p1/s0": 9}, finished=("p1/s0",))) == ["p2/s0"]


def test_v1_waits_for_every_probe_and_then_sends_the_longest_prompt_to_heavy() -> None:
    driven = driven_pair("pdsr_v1", heavy_percent=30.0)
    assert roles(driven.submit(samples(2, 3))) == {"p0/s0": "probe", "p1/s0": "probe"}
    assert driven.rows("heavy") == []
    assert admitted(driven.end("fast", {"p0/s0": 5, "p1/s0": 5}, finished=("p0/s0",))) == []
    commands = driven.end("fast", {"p1/s0": 50}, finished=("p1/s0",))
    assert admitted(commands, "fast") == ["p0/s1", "p0/s2"]
    assert admitted(commands, "heavy") == ["p1/s1", "p1/s2"]


def test_v1_hands_over_a_probe_at_its_limit_and_calls_its_prompt_heavy() -> None:
    driven = driven_pair("pdsr_v1", probe_limit_tokens=30, heavy_percent=1.0)
    (run,) = [one for one in driven.submit(samples(2, 2)) if isinstance(one, RunSegment)]
    assert run.limits.length == 30, "the segment ends at the limit"
    commands = driven.end("fast", {"p0/s0": 30, "p1/s0": 20}, finished=("p1/s0",))
    assert suspended(commands) == [("p0/s0", "probe limit")]
    assert admitted(commands, "heavy") == ["p0/s0", "p0/s1"]
    assert admitted(commands, "fast") == ["p1/s1"]


@pytest.mark.parametrize(("choice", "state"), [("suspend", SampleState.RUNNING), ("truncate", SampleState.DONE)])
def test_v1_hands_over_or_truncates_at_the_fast_limit(choice: str, state: SampleState) -> None:
    driven = driven_pair("pdsr_v1", slots=1, fast_limit_tokens=50, on_fast_limit=choice, heavy_percent=1.0)
    driven.submit(samples(2, 2))
    driven.end("fast", {"p0/s0": 9}, finished=("p0/s0",))
    driven.end("fast", {"p1/s0": 5}, finished=("p1/s0",))
    assert (driven.rows("fast"), driven.rows("heavy")) == (["p1/s1"], ["p0/s1"])
    driven.end("heavy", {"p0/s1": 5}, finished=("p0/s1",))
    commands = driven.end("fast", {"p1/s1": 50})
    assert suspended(commands) == [("p1/s1", "breaker" if choice == "suspend" else "truncated")]
    sample = driven.scheduler.samples["p1/s1"]
    assert (sample.state, sample.num_tokens) == (state, 50)


def test_v1_goes_on_without_heavy_workers() -> None:
    driven = Driven(make_scheduler("pdsr_v1", pdsr={"probe_limit_tokens": 10, "fast_limit_tokens": 10}))
    driven.join("fast", slots=1)
    driven.submit(samples(1, 2))
    assert suspended(driven.end("fast", {"p0/s0": 500})) == []
    assert admitted(driven.end("fast", {"p0/s0": 600}, finished=("p0/s0",))) == ["p0/s1"]


def test_v1_never_truncates_what_is_heavy() -> None:
    driven = driven_pair("pdsr_v1", slots=1, fast_limit_tokens=50, on_fast_limit="truncate")
    driven.submit(samples(1, 2))
    assert admitted(driven.end("fast", {"p0/s0": 9}, finished=("p0/s0",)), "heavy") == ["p0/s1"]
    assert admitted(driven.tell(WorkerLost(2.0, "heavy")), "fast") == ["p0/s1"]
    driven.join("heavy#2", "heavy", slots=1)
    commands = driven.end("fast", {"p0/s1": 60})
    assert suspended(commands) == [("p0/s1", "breaker")] and admitted(commands, "heavy#2") == ["p0/s1"]


def with_threshold(driven: Driven) -> None:
    """Returns finished samples of 10, 20, ... 50 tokens, whose 80th percentile is 40."""
    for i in range(5):
        worker = next(name for name in ("fast", "heavy") if f"p{i}/s0" in driven.rows(name))
        driven.end(worker, {f"p{i}/s0": 10 * (i + 1)}, finished=(f"p{i}/s0",))
    assert driven.scheduler.context.threshold == 40


def test_v2_judges_a_probe_when_it_ends() -> None:
    driven = driven_pair("pdsr_v2", slots=4, window_min=5)
    driven.submit(samples(5, 1), close=False)
    with_threshold(driven)
    assert roles(driven.submit(samples(2, 2, first=5))) == {"p5/s0": "probe", "p6/s0": "probe"}
    (short,) = driven.rows("fast")[-1:]
    commands = driven.end("fast", {short: 15}, finished=(short,))
    assert roles(commands) == {f"{short[:2]}/s1": "fast"}


def test_v2_judges_a_running_probe_that_is_past_the_threshold() -> None:
    driven = driven_pair("pdsr_v2", slots=4, window_min=5)
    driven.submit(samples(5, 1), close=False)
    with_threshold(driven)
    driven.submit(samples(1, 2, first=5))
    assert driven.rows("fast") == ["p5/s0"]
    commands = driven.end("fast", {"p5/s0": 64})
    assert roles(commands) == {"p5/s1": "heavy"}
    assert admitted(commands, "heavy") == ["p5/s1"]


def test_v2_is_neutral_before_enough_have_finished() -> None:
    driven = driven_pair("pdsr_v2", slots=1, window_min=5)
    driven.submit(samples(2, 3))
    driven.end("fast", {"p0/s0": 3000}, finished=("p0/s0",))
    assert roles(driven.last) == {"p0/s1": "fast"}


def test_v2_trips_the_breaker_hands_over_and_marks_the_prompt_hard() -> None:
    driven = driven_pair("pdsr_v2", slots=1, window_min=30, fast_limit_tokens=50)
    driven.submit(samples(2, 4))
    assert (driven.rows("fast"), driven.rows("heavy")) == (["p0/s0"], ["p1/s0"])
    driven.end("fast", {"p0/s0": 5}, finished=("p0/s0",))
    assert driven.rows("fast") == ["p0/s1"]
    commands = driven.end("fast", {"p0/s1": 50})
    assert suspended(commands) == [("p0/s1", "breaker")]
    assert roles(commands) == {"p0/s2": "heavy"}, "heavy is full, so that fast steals, but not what just tripped"
    commands = driven.end("heavy", {"p1/s0": 9}, finished=("p1/s0",))
    assert roles(commands) == {"p0/s1": "heavy"}
    assert probes_of(driven).verdicts["p0"] == "heavy"


def test_v2_doubles_the_limit_with_every_move_and_then_leaves_the_sample_with_heavy() -> None:
    driven = driven_pair("pdsr_v2", slots=1, window_min=30, fast_limit_tokens=50)
    driven.submit(samples(2, 1))
    assert suspended(driven.end("fast", {"p0/s0": 50})) == [("p0/s0", "breaker")]
    assert driven.rows("fast") == ["p0/s0"], "heavy is full, so that fast steals it back"
    assert suspended(driven.end("fast", {"p0/s0": 99})) == []
    assert suspended(driven.end("fast", {"p0/s0": 100})) == [("p0/s0", "breaker")]
    assert driven.rows("fast") == []
    assert admitted(driven.end("heavy", {"p1/s0": 200}, finished=("p1/s0",)), "heavy") == ["p0/s0"]


def test_v2_steals_both_ways() -> None:
    driven = driven_pair("pdsr_v2", slots=1, window_min=30)
    assert roles(driven.submit(samples(4, 1))) == {f"p{i}/s0": "probe" for i in range(2)}
    assert driven.rows("heavy") == ["p1/s0"]
    driven.end("heavy", {"p1/s0": 3}, finished=("p1/s0",))
    assert driven.rows("heavy") == ["p2/s0"]


def test_v2_takes_stolen_samples_back_after_a_while_if_their_workers_are_free() -> None:
    driven = driven_pair(
        "pdsr_v2", slots=1, fast_limit_tokens=120, history={"p0": 90, "p1": 9, "p2": 90}, finished=[40]
    )
    driven.submit(samples(3, 1))
    assert (driven.rows("fast"), driven.rows("heavy")) == (["p1/s0"], ["p0/s0"])
    driven.end("fast", {"p1/s0": 5}, finished=("p1/s0",))
    assert driven.rows("fast") == ["p2/s0"], "stolen"
    assert driven.running["fast"].limits.length == 30
    assert suspended(driven.end("fast", {"p2/s0": 30})) == [], "heavy is busy, and nothing short waits"
    assert driven.running["fast"].limits.length == 30, "the time begins again"
    driven.end("heavy", {"p0/s0": 99}, finished=("p0/s0",))
    commands = driven.end("fast", {"p2/s0": 60})
    assert suspended(commands) == [("p2/s0", "steal limit")] and admitted(commands, "heavy") == ["p2/s0"]


def test_v2_takes_only_so_many_stolen_samples_back_as_are_of_use() -> None:
    driven = driven_pair(
        "pdsr_v2", slots=4, fast_limit_tokens=120, history={f"p{i}": 90 for i in range(9)}, finished=[40]
    )
    driven.submit(samples(8, 1), close=False)
    stolen = driven.rows("fast")
    assert len(stolen) == 4
    driven.submit(samples(1, 1, first=8))
    heavy = driven.rows("heavy")
    driven.end("heavy", dict.fromkeys(heavy, 99), finished=tuple(heavy[:3]))
    assert driven.rows("heavy") == [heavy[3], "p8/s0"]
    assert suspended(driven.end("fast", dict.fromkeys(stolen, 30))) == [], "heavy is busy"
    rows = driven.rows("heavy")
    driven.end("heavy", dict.fromkeys(rows, 199), finished=tuple(rows))
    commands = driven.end("fast", dict.fromkeys(stolen, 60))
    assert suspended(commands) == [(uid, "steal limit") for uid in stolen] and driven.rows("heavy") == stolen
    assert {driven.scheduler.samples[uid].moves for uid in stolen} == {0}, "to be given back is no move"


def test_v2_gives_back_one_stolen_sample_for_each_short_one() -> None:
    history = {f"p{i}": 90 for i in range(8)} | {"p8": 9}
    driven = driven_pair("pdsr_v2", slots=4, fast_limit_tokens=120, history=history, finished=[40])
    driven.submit(samples(8, 1), close=False)
    stolen = driven.rows("fast")
    driven.submit(samples(1, 1, first=8))
    commands = driven.end("fast", dict.fromkeys(stolen, 30))
    assert suspended(commands) == [(stolen[0], "steal limit")]
    assert driven.rows("fast") == [*stolen[1:], "p8/s0"]


def test_a_stolen_sample_has_a_limit_in_seconds() -> None:
    driven = driven_pair("pdsr_v2", slots=1, unit="seconds", fast_limit_s=8.0)
    driven.submit(samples(2, 1), close=False)
    assert suspended(driven.end("fast", {"p0/s0": 9}, seconds=8.0)) == [("p0/s0", "breaker")]
    assert driven.rows("fast") == ["p0/s0"], "heavy is full, so that fast steals it back"
    driven.submit(samples(1, 1, first=2))
    assert suspended(driven.end("fast", {"p0/s0": 18}, seconds=1.5)) == []
    assert suspended(driven.end("fast", {"p0/s0": 21}, seconds=0.5)) == [("p0/s0", "steal limit")]


def test_v1_has_a_probe_limit_in_seconds() -> None:
    driven = driven_pair("pdsr_v1", unit="seconds", fast_limit_s=6.0)
    driven.submit(samples(1, 2))
    assert suspended(driven.end("fast", {"p0/s0": 9}, seconds=2.0)) == []
    commands = driven.end("fast", {"p0/s0": 12}, seconds=1.0)
    assert suspended(commands) == [("p0/s0", "probe limit")]


def test_v1_looks_up_for_the_last_probe_only_if_it_holds_samples_back() -> None:
    for group, length in ((2, 64), (1, 2000)):
        driven = Driven(make_scheduler("pdsr_v1", pdsr={"probe_limit_tokens": 4000}))
        driven.submit(samples(1, group))
        driven.join("fast", "fast", slots=2, capacity=2000)
        assert driven.running["fast"].limits.length == length


def test_adaptive_spreads_a_row_only_so_often() -> None:
    driven = driven_pair("adaptive", slots=4, max_moves=1)
    driven.submit(samples(8, 1))
    for entry in driven.scheduler.samples:
        entry.moves = 1
    driven.end("heavy", dict.fromkeys(driven.rows("heavy"), 9), finished=tuple(driven.rows("heavy")))
    assert suspended(driven.end("fast", dict.fromkeys(driven.rows("fast"), 64))) == []


@pytest.mark.parametrize(("share", "num_gone"), [(0.12, 2), (0.5, 8)])
def test_v2_empties_a_share_of_a_worker(share: float, num_gone: int) -> None:
    driven = driven_pair("pdsr_v2", slots=16, fast_limit_tokens=50, tripped_share=share)
    driven.submit(samples(32, 1))
    assert len(suspended(driven.end("fast", dict.fromkeys(driven.rows("fast"), 60)))) == num_gone


@pytest.mark.parametrize(("advance", "first"), [(0, "p0/s0"), (256, "p1/s0")])
def test_v2_lets_probes_overtake_as_many_samples_as_it_is_told(advance: int, first: str) -> None:
    driven = driven_pair("pdsr_v2", slots=1, probe_advance=advance, history={"p0": 9}, finished=[40])
    driven.submit(samples(1, 3) + samples(1, 1, first=1))
    assert driven.rows("fast") == [first]


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_known_prompts_are_judged_without_a_probe(policy: str) -> None:
    driven = driven_pair(policy, slots=4, history={"p0": 5, "p1": 500}, finished=[10, 20, 30, 40, 50])
    commands = driven.submit(samples(3, 3))
    assert roles(commands) == {f"p0/s{i}": "fast" for i in range(3)} | {f"p1/s{i}": "heavy" for i in range(3)} | {
        "p2/s0": "probe"
    }
    assert admitted(commands, "heavy") == ["p1/s0", "p1/s1", "p1/s2"]


@pytest.mark.parametrize("policy", ["pdsr_v1", "pdsr_v2"])
def test_a_second_step_knows_the_threshold_of_the_first(policy: str) -> None:
    rules = {"heavy_percent": 40.0, "percentile": 60.0 if policy == "pdsr_v2" else 1.0, "window_min": 5}
    driven = Driven(make_scheduler(policy, pdsr=rules, finished=[10, 20, 30, 40, 50]))
    assert driven.scheduler.context.threshold == 30
    driven.submit(samples(2, 2))
    driven.join("fast", "fast", slots=4)
    driven.join("heavy", "heavy", slots=4)
    assert driven.running["fast"].limits.length == 64, "held back samples wait for an early verdict"
    commands = driven.end("fast", {"p0/s0": 60, "p1/s0": 12}, finished=("p1/s0",))
    assert admitted(commands, "heavy") == ["p0/s1"] and admitted(commands, "fast") == ["p1/s1"]
    assert suspended(commands) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_leave_slots_that_they_outgrow_and_never_come_back(policy: str) -> None:
    driven = Driven(make_scheduler(policy))
    driven.join("fast", "fast", slots=2, max_length=50)
    driven.join("heavy", "heavy", slots=1)
    driven.submit(samples(4, 1))
    first = driven.rows("fast")
    assert len(first) == 2 and driven.running["fast"].limits.length == 40, "prompts have 10 tokens"
    commands = driven.end("fast", dict.fromkeys(first, 40))
    assert {uid for uid, _ in suspended(commands)} == set(first)
    assert not set(first) & set(driven.rows("fast")), "they do not fit, although slots are free"
    while not is_finished(driven.scheduler):
        worker = next(name for name in ("heavy", "fast") if driven.rows(name))
        rows = driven.rows(worker)
        driven.end(worker, {uid: driven.scheduler.samples[uid].num_tokens + 9 for uid in rows}, finished=tuple(rows))
    assert all(driven.scheduler.samples[uid].num_tokens == 49 for uid in first)


def test_a_probe_that_outgrows_its_slot_is_heavy() -> None:
    for policy in ("pdsr_v1", "pdsr_v2"):
        driven = Driven(make_scheduler(policy))
        driven.join("fast", "fast", slots=1, max_length=50)
        driven.join("heavy", "heavy", slots=2)
        driven.submit(samples(1, 2))
        driven.end("fast", {"p0/s0": 40})
        assert driven.rows("heavy") == ["p0/s0", "p0/s1"]


def test_adaptive_starts_one_sample_of_each_prompt_first() -> None:
    driven = Driven(make_scheduler("adaptive"))
    driven.join("w", slots=4)
    commands = driven.submit(samples(3, 3))
    assert roles(commands) == {"p0/s0": "probe", "p1/s0": "probe", "p2/s0": "probe", "p0/s1": "fast"}


def test_adaptive_takes_the_siblings_of_the_longest_group() -> None:
    driven = Driven(make_scheduler("adaptive"))
    driven.join("w", slots=2)
    driven.submit(samples(2, 2))
    assert admitted(driven.end("w", {"p0/s0": 5, "p1/s0": 64}, finished=("p0/s0",))) == ["p1/s1"]


def test_adaptive_believes_the_history_of_a_prompt() -> None:
    driven = Driven(make_scheduler("adaptive", history={"p0": 10, "p1": 500, "p2": 90}))
    driven.join("w", slots=3)
    assert admitted(driven.submit(samples(3, 1))) == ["p1/s0", "p2/s0", "p0/s0"]


def test_adaptive_compares_seconds_with_seconds() -> None:
    rules = {"unit": "seconds", "window": 32, "window_min": 1, "percentile": 50}
    driven = Driven(make_scheduler("adaptive", pdsr=rules))
    driven.join("w", slots=2)
    driven.submit(samples(2, 3))
    # 100 tokens in 1 s: far below the threshold in seconds, whatever the number of tokens.
    driven.end("w", {"p0/s0": 100, "p1/s0": 50}, finished=("p0/s0",), seconds=1.0)
    (run,) = [one for one in driven.last if isinstance(one, RunSegment)]
    assert driven.scheduler.context.threshold == 1.0
    assert [(one.uid, one.role) for one in run.admit] == [("p0/s1", "fast")]


def test_adaptive_lets_nobody_starve() -> None:
    driven = Driven(make_scheduler("adaptive", history={"p0": 1} | {f"p{i}": 4000 for i in range(1, 2000)}))
    driven.join("w", slots=1)
    driven.submit(samples(1, 2), close=False)
    for i in range(1, 2000):
        driven.submit(samples(1, 1, first=i), close=False)
        (uid,) = driven.rows("w")
        if i > 1 and uid == "p0/s1":
            assert i <= 300
            return
        driven.end("w", {uid: 10}, finished=(uid,))
    pytest.fail("a short sample waited for all long ones")


def test_adaptive_moves_no_row_while_work_waits_and_takes_back_what_was_lost_first() -> None:
    driven = driven_pair("adaptive", slots=4, window_min=5)
    driven.submit(samples(5, 1), close=False)
    with_threshold(driven)
    driven.submit(samples(20, 1, first=5))
    before = driven.rows("fast")
    commands = driven.end("fast", {uid: 64 if uid == before[0] else 8 for uid in before})
    assert suspended(commands) == [] and driven.rows("fast") == before
    driven.tell(WorkerLost(9.0, "fast"))
    others = driven.rows("heavy")
    commands = driven.end("heavy", {uid: 10 + i for i, uid in enumerate(others)}, finished=(others[0],))
    assert admitted(commands, "heavy") == [before[0]]


def test_adaptive_spreads_the_last_rows() -> None:
    driven = driven_pair("adaptive", slots=4)
    driven.submit(samples(8, 1))
    driven.end("heavy", dict.fromkeys(driven.rows("heavy"), 9), finished=tuple(driven.rows("heavy")))
    commands = driven.end("fast", dict.fromkeys(driven.rows("fast"), 64))
    assert {why for _, why in suspended(commands)} == {"spread"}
    assert (len(driven.rows("fast")), len(driven.rows("heavy"))) == (2, 2)
