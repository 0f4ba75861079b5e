"""What every test of worker processes is watched by."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reward.processes import children, open_files


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    """No process, zombie or open file survives the block that opened the rewards."""
    before = open_files()
    yield
    assert children() == []
    assert open_files() == before
