import copy
import errno
import fcntl
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.rollout.scheduling import length_traces
from app.rollout.scheduling.cost_model import CostModel
from app.rollout.scheduling.event_log import EventLog, EventRecord, is_event_log, read_event_log
from app.rollout.scheduling.events import (
    Closed,
    Event,
    SegmentEnded,
    WorkerJoined,
    WorkerLost,
    message_from_json,
    message_to_json,
)
from app.rollout.scheduling.metrics import schedule_metrics, slot_spans
from app.rollout.scheduling.scheduler import POLICIES, Scheduler
from app.rollout.scheduling.simulator import SchedulerSimulator, SimulatedWorkerSpec
from settings.errors import InputError
from tests.rollout.scheduling.driving import make_scheduler, write_log
from tests.rollout.scheduling.storms import storm

MINE = {"seed": 0, "the prompts": "0" * 64}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[EventRecord]]:
    path = tmp_path / "events.jsonl"
    records = storm(3).run()
    write_log(path, records, storm(3).scheduler, run=MINE)
    return path, records


def test_messages_survive_json() -> None:
    for seed in range(20):
        for event, commands in storm(seed).run():
            for message in (event, *commands):
                assert message_from_json(json.loads(json.dumps(message_to_json(message)))) == message


def test_a_log_replays_to_the_same_commands_and_the_same_state(written: tuple[Path, list[EventRecord]]) -> None:
    path, records = written
    assert read_event_log(path, identity=MINE).records == records
    clock = storm(3)
    clock.run()
    assert read_event_log(path, identity=MINE).scheduler.snapshot() == clock.scheduler.snapshot()


def test_a_log_of_another_run_is_refused(written: tuple[Path, list[EventRecord]]) -> None:
    with pytest.raises(InputError, match=r"differs: seed \(0 there, 1 here\), the prompts\."):
        read_event_log(written[0], identity={"seed": 1})


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for text in ('{"uid": "a"}\n', "notes\nof mine\n", "notes"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"expected a rollout's event log .*move it away"):
            EventLog(path, identity=MINE)
        assert path.read_text() == text


def test_a_line_that_a_crash_cut_off_is_left_out(written: tuple[Path, list[EventRecord]]) -> None:
    path, records = written
    path.write_bytes(path.read_bytes()[:-20])
    assert read_event_log(path, identity=MINE).records == records[:-1]


def test_a_broken_line_in_the_middle_is_refused(written: tuple[Path, list[EventRecord]]) -> None:
    path, _ = written
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:-5], *lines[4:]]))
    with pytest.raises(InputError, match=r":4: not JSON"):
        read_event_log(path, identity=MINE)


def test_an_answer_that_the_program_would_not_give_is_refused(written: tuple[Path, list[EventRecord]]) -> None:
    path, _ = written
    lines = path.read_text().splitlines()
    changed = json.loads(lines[-1]) | {"commands": [{"type": "Retire", "worker": "nobody"}]}
    path.write_text("\n".join([*lines[:-1], json.dumps(changed)]))
    with pytest.raises(InputError, match=r"answers \w+ otherwise"):
        read_event_log(path, identity=MINE)


def test_a_log_that_nothing_was_written_to_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(path, identity=MINE) as log:
        assert log.state is None and path.stat().st_size == 0
    assert not path.exists()


@pytest.mark.parametrize("num_bytes", [0, 1, 30, 200, -2])
def test_a_log_that_was_cut_in_its_header_is_begun_anew(num_bytes: int, tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, [], storm(3).scheduler, run=MINE)
    whole = path.read_bytes()
    path.write_bytes(whole[:num_bytes])
    with EventLog(path, identity=MINE) as log:
        assert log.state is None
    assert not path.exists()
    path.write_bytes(whole[:num_bytes])
    with EventLog(path, identity=MINE) as log:
        log.start_or_resume(storm(3).scheduler)
    assert path.read_bytes() == whole


def test_a_finished_log_is_removed_or_kept_where_it_should_be(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", identity=MINE) as log:
        log.start_or_resume(storm(3).scheduler)
        log.finish()
    assert list(tmp_path.iterdir()) == []
    with EventLog(tmp_path / "log", identity=MINE) as log:
        log.start_or_resume(storm(3).scheduler)
        log.finish(keep=tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and is_event_log(tmp_path / "kept")
    with EventLog(tmp_path / "log", identity=MINE) as log:
        log.start_or_resume(storm(3).scheduler)
        log.finish(keep=tmp_path / "folder" / ".." / "log")
    assert is_event_log(tmp_path / "log")


def test_only_one_at_a_time_has_the_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", identity=MINE) as log:
        log.start_or_resume(storm(3).scheduler)
        with pytest.raises(InputError, match="another process is running this rollout"):
            EventLog(tmp_path / "log", identity=MINE)
    with EventLog(tmp_path / "log", identity=MINE) as log:
        assert log.state is not None and log.state.records == []


def test_a_disk_without_locks_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(InputError, match="cannot be written or locked: No locks available; give another --out"):
        EventLog(tmp_path / "log", identity=MINE)


def test_what_is_appended_after_a_torn_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    records = list(itertools.takewhile(lambda record: not isinstance(record.event, SegmentEnded), storm(3).run()))
    write_log(path, records, storm(3).scheduler, run=MINE)
    for torn in (b"{", b'{"event": \n', b"\0" * 9):
        path.write_bytes(path.read_bytes() + torn)
        with EventLog(path, identity=MINE) as log:
            assert log.state is not None and log.state.records == records
            records.append(told(log, Closed(9.0)))
    path.write_bytes(path.read_bytes()[:-1])  # whole, but for the end of the line
    with EventLog(path, identity=MINE) as log:
        records.append(told(log, WorkerLost(10.0, "nobody", "")))
    assert read_event_log(path).records == records


def told(log: EventLog, event: Event) -> EventRecord:
    assert log.state is not None
    record = EventRecord(event, tuple(log.state.scheduler.handle(event)))
    log.append(record, {})
    return record


def test_tokens_that_are_not_those_committed_are_refused(written: tuple[Path, list[EventRecord]]) -> None:
    path, _ = written
    lines = path.read_text().splitlines(keepends=True)
    for drawn in ({"p0/s0": "AAAA"}, {"p0/s0": "no base64"}, {"p0/s0": 7}, ["p0/s0"]):
        path.write_text("".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"drawn": drawn}) + "\n"]))
        before = path.read_bytes()
        with pytest.raises(InputError, match="the log is damaged: delete it"):
            EventLog(path, identity=MINE)
        assert path.read_bytes() == before


WRONG = (None, "x", "7", -1, 0, 1.5, 10**400, True, [], {}, [None], {"x": None})


@pytest.mark.parametrize("policy", POLICIES)
def test_a_damaged_log_is_an_error_for_people_whatever_is_wrong(policy: str, tmp_path: Path) -> None:
    """Any one value replaced by any other: what can be read can also be shown."""
    path, rng = tmp_path / "log", random.Random(0)
    trace = length_traces.equal(prompts=2, group=2, length=9)
    specs = [SimulatedWorkerSpec("f", "fast", 2), SimulatedWorkerSpec("h", "heavy", 2)]
    clock = SchedulerSimulator(make_scheduler(policy), trace, specs, CostModel(), max_new=20)
    write_log(path, clock.run(), make_scheduler(policy), run=MINE)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    num_refused = 0
    for _ in range(400):
        changed = copy.deepcopy(lines)
        holder, key = rng.choice([place for line in changed for place in places_in(line)])
        holder[key] = rng.choice(WRONG)
        path.write_text("\n".join(map(json.dumps, changed)))
        try:
            begun = read_event_log(path)
            schedule_metrics(begun.records)
            list(slot_spans(begun.records))
        except InputError as error:
            num_refused += 1
            assert (
                "damaged" in str(error) or "otherwise" in str(error) or "expected a rollout's event log" in str(error)
            )
    assert num_refused > 200


def places_in(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (object or list, key) of everything inside."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from places_in(value[key])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"slots": 0}, "a worker of 0 slots"),
        ({"slots": "4"}, "WorkerJoined.slots: got '4'"),
        ({"at": None}, "WorkerJoined.at: got None"),
        ({"kind": "slow"}, "WorkerJoined.kind: got 'slow'"),
        ({"rungs": [True]}, "WorkerJoined.rungs: got True"),
    ],
)
def test_what_is_no_message_is_named(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        message_from_json(message_to_json(WorkerJoined(0.0, "a", "fast", 4, (2,))) | wrong)


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_a_rollout_killed_half_way_finishes_from_its_log(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = storm(seed)
    records = whole.run()
    write_log(path, records[: len(records) // 2], storm(seed).scheduler, run=MINE)
    survivor = read_event_log(path, identity=MINE).scheduler
    committed = {entry.uid: entry.num_tokens for entry in survivor.samples}
    finish(survivor, whole)
    assert survivor.is_finished
    for entry in survivor.samples:
        assert entry.num_tokens >= committed.get(entry.uid, 0)


def finish(survivor: Scheduler, whole: SchedulerSimulator) -> None:
    """New workers take over what is left; the trace gives every sample its length."""
    for name in list(survivor.context.workers):
        survivor.handle(WorkerLost(0.0, name, "the process ended"))
    trace = list(whole.trace_samples.values())
    SchedulerSimulator(
        survivor,
        trace,
        [SimulatedWorkerSpec("after the crash", "fast", 4)],
        whole.cost,
        max_new=whole.max_new,
        check=True,
        num_submissions=0 if survivor.is_closed else 1,
    ).run()
