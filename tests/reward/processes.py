"""Finds child processes and open files in /proc, for tests that start worker processes."""

import os
import select
import sys
from collections.abc import Iterator
from multiprocessing.resource_tracker import _resource_tracker
from pathlib import Path

import pytest

from app.plugins.values import event_loop
from tests.program import DEADLINE_S

WORKERS = [
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes in /proc"),
    pytest.mark.usefixtures("nothing_is_left"),
]
"""Marks of a module whose tests start worker processes."""


def children() -> list[int]:
    """Returns the living and dead children of this process, except multiprocessing's resource tracker."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(") ")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid() and int(stat.parent.name) != getattr(_resource_tracker, "_pid", None):
            found.append(int(stat.parent.name))
    return found


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Asserts that no process, zombie or open file remains after a test."""
    event_loop()  # stays open for all coroutines of this process
    before = os.listdir("/proc/self/fd")
    yield
    assert children() == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


def ended(pid: int) -> bool:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], DEADLINE_S)[0])
    finally:
        os.close(descriptor)
