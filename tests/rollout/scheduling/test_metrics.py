import math

import pytest

from app.rollout.scheduling.protocol import (
    Answered,
    Closed,
    Event,
    EventRecord,
    Released,
    RowReport,
    Submitted,
    WorkerLost,
)
from app.rollout.scheduling.schedule_metrics import (
    ScheduleMetricsTracker,
    Span,
    schedule_metrics,
    slot_spans,
)
from tests.rollout.scheduling.driving import Driven, joined, make_scheduler, samples
from tests.rollout.scheduling.storms import storm


def handed_over() -> list[EventRecord]:
    """Returns the events of two samples; one trips the breaker of the fast worker, which dies, and continues on the
    heavy one."""
    driven = Driven(make_scheduler("pdsr_v2", pdsr={"fast_limit_tokens": 10}))
    records = []

    def tell(event) -> None:
        records.append(EventRecord(event, tuple(driven.tell(event))))

    tell(joined(0.0, "fast", "fast", 1))
    tell(joined(0.0, "heavy", "heavy", 1))
    tell(Submitted(0.0, samples(2, 1)))
    tell(Closed(0.0))
    tell(driven.ended("heavy", {"p1/s0": 4}, seconds=2.0))
    tell(driven.ended("fast", {"p0/s0": 10}, seconds=2.0))  # at 4
    tell(WorkerLost(4.0, "fast"))
    tell(driven.ended("heavy", {"p1/s0": 6}, finished=("p1/s0",), seconds=2.0))  # at 6
    tell(driven.ended("heavy", {"p0/s0": 15}, finished=("p0/s0",), seconds=4.0))  # at 10
    return records


def test_figures_by_hand() -> None:
    found = schedule_metrics(handed_over())
    assert found.makespan_s == 10
    assert (found.useful_tokens, found.segments, found.breaker_trips, found.suspensions) == (21, 4, 1, 1)
    assert found.repacked_tokens == 10
    assert found.truncated == 0


def test_slots_count_while_their_worker_is_there() -> None:
    driven = Driven(make_scheduler())
    records = []

    def tell(event: Event) -> None:
        records.append(EventRecord(event, tuple(driven.tell(event))))

    tell(joined(0.0, "a", "fast", 1))
    tell(Submitted(1.0, samples(2, 1)))
    driven.at = 1.0
    tell(driven.ended("a", {"p0/s0": 4}, seconds=4.0))  # at 5
    tell(WorkerLost(5.0, "a"))
    tell(joined(7.0, "a#2", "fast", 2))
    tell(Closed(7.0))
    driven.at = 7.0
    tell(driven.ended("a#2", {"p0/s0": 7, "p1/s0": 6}, finished=("p0/s0", "p1/s0"), seconds=3.0))  # at 10
    tell(WorkerLost(20.0, "a#2"))
    share = (3 / 6 + 6 / 6) * 3 + 4
    assert schedule_metrics(records).bubble == pytest.approx(1 - share / (1 * 4 + 2 * 3))
    tracker = ScheduleMetricsTracker()
    for record in records[:4]:
        tracker.add(record)
    tracker.take_window()
    for record in records[4:]:
        tracker.add(record)
    assert tracker.take_window().bubble == pytest.approx(1 - (share - 4) / (2 * 3))


def test_windows_by_hand() -> None:
    tracker, records = ScheduleMetricsTracker(), handed_over()
    for record in records[:8]:
        tracker.add(record)
    first = tracker.take_window()
    tracker.add(EventRecord(Released(6.0, ("p1/s0",)), ()))
    for record in records[8:]:
        tracker.add(record)
    second = tracker.take_window()
    assert (first.makespan_s, first.useful_tokens, first.segments) == (6, 16, 3)
    assert (second.makespan_s, second.useful_tokens, second.segments) == (4, 5, 1)
    assert math.isnan(first.tail_fraction) and list(tracker.num_tokens) == ["p0/s0"]


def test_the_spans_of_a_handed_over_sample() -> None:
    of_sample = [one for one in slot_spans(handed_over()) if one.uid == "p0/s0"]
    assert of_sample[0] == Span("fast", 0, 2.0, 4.0, "probe", "p0/s0")
    assert [one.role for one in of_sample][-1] == "heavy"


def test_spans_never_overlap_in_a_slot() -> None:
    for seed in range(60):
        ends: dict[tuple[str, int], float] = {}
        for one in slot_spans(calm(seed)):
            if one.slot < 0:
                continue
            place = (one.worker, one.slot)
            assert one.start_s >= ends.get(place, 0.0) - 1e-9, f"seed {seed}: {one}"
            ends[place] = one.end_s


def calm(seed: int) -> list[EventRecord]:
    clock = storm(seed)
    clock.faults = type(clock.faults)()
    return clock.run()


def test_where_nothing_is_expected_nothing_is_recalled_or_stolen() -> None:
    driven = Driven(make_scheduler("sync"))
    records = []
    workers = (joined(0.0, "f", "fast", 2), joined(0.0, "h", "heavy", 2))
    for event in (*workers, Submitted(0.0, samples(4, 1)), Closed(0.0)):
        records.append(EventRecord(event, tuple(driven.tell(event))))
    for worker in ("f", "h"):
        tokens = {uid: 5 + i for i, uid in enumerate(driven.rows(worker))}
        event = driven.ended(worker, tokens, finished=tuple(tokens))
        records.append(EventRecord(event, tuple(driven.tell(event))))
    found = schedule_metrics(records)
    assert (found.probe_recall, found.stolen, found.useful_tokens) == (None, 0, 22)


def test_truncated_samples_have_ended() -> None:
    rules = {"fast_limit_tokens": 10, "on_fast_limit": "truncate"}
    driven = Driven(make_scheduler("pdsr_v1", pdsr=rules))
    records = []
    workers = (joined(0.0, "f", "fast", 2), joined(0.0, "h", "heavy", 2))
    for event in (*workers, Submitted(0.0, samples(2, 2)), Closed(0.0)):
        records.append(EventRecord(event, tuple(driven.tell(event))))

    def end(worker: str, finished: tuple[str, ...], length: int) -> None:
        event = driven.ended(worker, dict.fromkeys(driven.rows(worker), length), finished=finished)
        records.append(EventRecord(event, tuple(driven.tell(event))))

    end("f", ("p0/s0", "p1/s0"), 4)
    end("f", (), 10)
    found = schedule_metrics(records)
    assert found.truncated == 1 and found.makespan_s == driven.at
    end("h", tuple(driven.rows("h")), 10)
    # Three of four have ended when the tail begins.
    assert schedule_metrics(records).tail_fraction == pytest.approx(1 - 2 / 3)


def test_figures_of_turns_by_hand() -> None:
    driven = Driven(make_scheduler(history={"p0": 5}))
    records: list[EventRecord] = []

    def tell(event: Event) -> None:
        records.append(EventRecord(event, tuple(driven.tell(event))))

    tell(joined(0.0, "a", "heavy", 1))
    tell(Submitted(0.0, samples(1, 1)))
    tell(Closed(0.0))
    tell(driven.ended("a", {"p0/s0": 4}, seconds=4.0))
    tell(driven.ended("a", {"p0/s0": 6}, acting=("p0/s0",), seconds=2.0))  # at 6
    tell(Answered(9.0, (RowReport("p0/s0", 16, None),)))
    driven.at = 9.5
    tell(driven.ended("a", {"p0/s0": 17}, acting=("p0/s0",), seconds=0.5))  # at 10
    tell(WorkerLost(10.0, "a"))
    tell(joined(11.0, "b", "fast", 1))
    tell(Answered(14.0, (RowReport("p0/s0", 20, None),)))
    driven.at = 14.0
    tell(driven.ended("b", {"p0/s0": 21}, acting=("p0/s0",), seconds=1.0))  # at 15
    tell(Answered(20.0, (RowReport("p0/s0", 21, "stop"),)))
    found = schedule_metrics(records)
    assert found.suspensions == 0
    assert (found.useful_tokens, found.repacked_tokens) == (8, 20)
    assert (found.makespan_s, found.stolen) == (20, 1), "a short one began on a heavy worker"
    outside = [(one.start_s, one.end_s) for one in slot_spans(records) if one.slot < 0]
    assert outside == [(6.0, 9.0), (10.0, 14.0)]


def test_a_log_without_samples_has_figures() -> None:
    driven = Driven(make_scheduler())
    event = joined(0.0, "a", "fast", 1)
    found = schedule_metrics([EventRecord(event, tuple(driven.tell(event)))])
    assert found.probe_recall is None and found.bubble == pytest.approx(1.0)
