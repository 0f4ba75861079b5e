import itertools
import json
from pathlib import Path

import pytest

from app.rollout.scheduling.event_log import EventLog, LogRecord, is_log, read_log, replay, write_log
from app.rollout.scheduling.events import Closed, Event, SegmentEnded, WorkerLost, from_json, to_json
from app.rollout.scheduling.scheduler import Scheduler
from app.rollout.scheduling.virtual_clock import VirtualClock, WorkerSpec
from settings.errors import InputError
from tests.rollout.scheduling.storms import storm

MINE = {"seed": 0, "the prompts": "0" * 64}


@pytest.fixture
def written(tmp_path: Path) -> tuple[Path, list[LogRecord]]:
    path = tmp_path / "events.jsonl"
    records = storm(3).run()
    write_log(path, records, run=MINE, scheduler=storm(3).scheduler)
    return path, records


def test_messages_survive_json() -> None:
    for seed in range(20):
        for event, commands in storm(seed).run():
            for message in (event, *commands):
                assert from_json(json.loads(json.dumps(to_json(message)))) == message


def test_a_log_replays_to_the_same_commands_and_the_same_state(written: tuple[Path, list[LogRecord]]) -> None:
    path, records = written
    assert read_log(path, run=MINE).records == records
    clock = storm(3)
    clock.run()
    assert replay(path, run=MINE).snapshot() == clock.scheduler.snapshot()


def test_a_log_of_another_run_is_refused(written: tuple[Path, list[LogRecord]]) -> None:
    with pytest.raises(InputError, match=r"differs: seed \(0 there, 1 here\), the prompts\."):
        replay(written[0], run={"seed": 1})


def test_a_file_that_is_no_log_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    for text in ('{"uid": "a"}\n', "notes\nof mine\n", "notes"):
        path.write_text(text)
        with pytest.raises(InputError, match=r"expected a rollout's event log .*move it away"):
            EventLog(path, run=MINE)
        assert path.read_text() == text


def test_a_line_that_a_crash_cut_off_is_left_out(written: tuple[Path, list[LogRecord]]) -> None:
    path, records = written
    path.write_bytes(path.read_bytes()[:-20])
    assert read_log(path, run=MINE).records == records[:-1]


def test_a_broken_line_in_the_middle_is_refused(written: tuple[Path, list[LogRecord]]) -> None:
    path, _ = written
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:-5], *lines[4:]]))
    with pytest.raises(InputError, match=r":4: not JSON"):
        replay(path, run=MINE)


def test_an_answer_that_the_program_would_not_give_is_refused(written: tuple[Path, list[LogRecord]]) -> None:
    path, _ = written
    lines = path.read_text().splitlines()
    changed = json.loads(lines[-1]) | {"commands": [{"type": "Retire", "worker": "nobody"}]}
    path.write_text("\n".join([*lines[:-1], json.dumps(changed)]))
    with pytest.raises(InputError, match=r"answers \w+ otherwise"):
        replay(path, run=MINE)


def test_a_log_that_nothing_was_written_to_goes_away(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with EventLog(path, run=MINE) as log:
        assert log.begun is None and path.stat().st_size == 0
    assert not path.exists()
    path.touch()  # as a process leaves it that was killed before it wrote the header
    with EventLog(path, run=MINE) as log:
        assert log.begun is None


def test_a_finished_log_is_removed_or_kept_where_it_should_be(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", run=MINE) as log:
        log.begin(storm(3).scheduler)
        log.finish()
    assert list(tmp_path.iterdir()) == []
    with EventLog(tmp_path / "log", run=MINE) as log:
        log.begin(storm(3).scheduler)
        log.finish(keep=tmp_path / "kept")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"] and is_log(tmp_path / "kept")
    with EventLog(tmp_path / "log", run=MINE) as log:
        log.begin(storm(3).scheduler)
        log.finish(keep=tmp_path / "folder" / ".." / "log")
    assert is_log(tmp_path / "log")


def test_only_one_at_a_time_has_the_log(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", run=MINE) as log:
        log.begin(storm(3).scheduler)
        with pytest.raises(InputError, match="another process is at this rollout"):
            EventLog(tmp_path / "log", run=MINE)
    with EventLog(tmp_path / "log", run=MINE) as log:
        assert log.begun is not None and log.begun.records == []


def test_what_is_appended_after_a_torn_line_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "log"
    records = list(itertools.takewhile(lambda record: not isinstance(record.event, SegmentEnded), storm(3).run()))
    write_log(path, records, run=MINE, scheduler=storm(3).scheduler)
    for torn in (b"{", b'{"event": \n', b"\0" * 9):
        path.write_bytes(path.read_bytes() + torn)
        with EventLog(path, run=MINE) as log:
            assert log.begun is not None and log.begun.records == records
            records.append(told(log, Closed(9.0)))
    path.write_bytes(path.read_bytes()[:-1])  # whole, but for the end of the line
    with EventLog(path, run=MINE) as log:
        records.append(told(log, WorkerLost(10.0, "nobody", "")))
    assert read_log(path).records == records


def told(log: EventLog, event: Event) -> LogRecord:
    assert log.begun is not None
    record = LogRecord(event, tuple(log.begun.scheduler.handle(event)))
    log.append(record, {})
    return record


def test_tokens_that_are_not_those_committed_are_refused(written: tuple[Path, list[LogRecord]]) -> None:
    path, _ = written
    lines = path.read_text().splitlines(keepends=True)
    for drawn in ({"p0/s0": "AAAA"}, {"p0/s0": "no base64"}, {"p0/s0": 7}, ["p0/s0"]):
        path.write_text("".join([*lines[:-1], json.dumps(json.loads(lines[-1]) | {"drawn": drawn}) + "\n"]))
        before = path.read_bytes()
        with pytest.raises(InputError, match="the log is damaged: delete it"):
            EventLog(path, run=MINE)
        assert path.read_bytes() == before


@pytest.mark.parametrize("seed", range(0, 40, 4))
def test_a_rollout_killed_half_way_finishes_from_its_log(seed: int, tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    whole = storm(seed)
    records = whole.run()
    write_log(path, records[: len(records) // 2], run=MINE, scheduler=storm(seed).scheduler)
    survivor = replay(path, run=MINE)
    committed = {entry.uid: entry.num_tokens for entry in survivor.ledger}
    finish(survivor, whole)
    assert survivor.is_finished
    for entry in survivor.ledger:
        assert entry.num_tokens >= committed.get(entry.uid, 0)


def finish(survivor: Scheduler, whole: VirtualClock) -> None:
    """New workers take over what is left; the trace gives every sample its length."""
    for name in list(survivor.context.workers):
        survivor.handle(WorkerLost(0.0, name, "the process ended"))
    trace = list(whole.traced.values())
    VirtualClock(
        survivor,
        trace,
        [WorkerSpec("after the crash", "fast", 4)],
        whole.cost,
        max_new=whole.max_new,
        check=True,
        num_waves=0 if survivor.is_closed else 1,
    ).run()
