"""Fixtures of tests that start worker processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.plugins.values import event_loop
from tests.reward.processes import children, open_files


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """Asserts that no process, zombie or open file remains after a block that opened rewards."""
    event_loop()  # stays for all coroutines of this process
    before = open_files()
    yield
    assert children() == []
    assert open_files() == before
