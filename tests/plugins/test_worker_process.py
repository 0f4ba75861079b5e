"""Tests of the pipes of a worker; `tests/reward` has those of what contains it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.plugins.worker_process import WorkerProcess, wait_for_answers, worker_environment
from tests.reward.processes import WORKERS

pytestmark = WORKERS

PROGRAM = """
import os, sys, time
from app.plugins.worker_program import TrainerChannel

def main():
    import app  # that of the user, because those of the program are forgotten
    channel = TrainerChannel()
    channel.send({"app": app.__file__})
    while True:
        match channel.receive()["do"]:
            case "pieces":
                for piece in (b'{"a": ', b'1}\\n{"b"', b': 2}\\n'):
                    os.write(channel._answers, piece)
                    time.sleep(0.05)
            case "twice":
                os.write(channel._answers, b'{"c": 3}\\n{"d": 4}\\n')
            case "number":
                os.write(channel._answers, b'5\\n')
            case "big":
                channel.send({"text": "x" * 10**6})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WorkerProcess]:
    (tmp_path / "talker.py").write_text(PROGRAM)
    (tmp_path / "app.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    worker = WorkerProcess("talker", worker_environment([]))
    yield worker
    worker.kill()


def answers(worker: WorkerProcess, number: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    while len(found) < number:
        for _, new in wait_for_answers([worker]):
            assert new is not None
            found += new
    return found


def test_answers_are_read_in_pieces_and_several_at_once(worker: WorkerProcess, tmp_path: Path) -> None:
    assert answers(worker, 1) == [{"app": str(tmp_path / "app.py")}]
    for do in ("pieces", "twice", "big"):
        worker.send({"do": do})
    assert answers(worker, 5) == [{"a": 1}, {"b": 2}, {"c": 3}, {"d": 4}, {"text": "x" * 10**6}]


def test_an_answer_that_is_no_object_counts_as_an_end(worker: WorkerProcess) -> None:
    answers(worker, 1)
    worker.send({"do": "number"})
    events: list[Any] = []
    while not events:  # the write of the message is an event, too
        events = wait_for_answers([worker])
    assert events == [(worker, None)]


def test_an_alarm_ends_the_wait() -> None:
    alarm, ring = os.pipe()
    os.write(ring, b"xx")
    assert wait_for_answers([], alarm=alarm) == []
    assert wait_for_answers([], alarm=alarm, timeout_s=0) == []
    os.close(alarm)
    os.close(ring)
