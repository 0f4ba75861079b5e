"""Tests of notices between hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from app.distributed.status_board import KEY_PREFIX, StatusBoard

DEADLINE_S = 30


class Shared:
    """A key-value store shared by several boards, like that of JAX."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_gone = False
        self.was_asked = threading.Event()

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        self._reach()
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self._reach()
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def _reach(self) -> None:
        self.was_asked.set()
        if self.is_gone:
            raise RuntimeError("UNAVAILABLE")


def eventually(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not happens():
        assert time.monotonic() < end


def test_every_host_reads_what_one_has_posted_and_its_last_word_counts() -> None:
    store = Shared()
    with StatusBoard(store, host=0, num_hosts=2) as first, StatusBoard(store, host=1, num_hosts=2) as second:
        second.post("stop", "early")
        second.post("stop", "late")
        first.post("stuck", "rollout")
        assert second.read("stop") == {1: "late"}
        eventually(lambda: first.read("stop") == {1: "late"} and second.read("stuck") == {0: "rollout"})
        assert first.read("failed") == {}


def test_a_store_that_cannot_be_reached_costs_the_news_and_nothing_else() -> None:
    store = Shared()
    store.is_gone = True
    with StatusBoard(store, host=1, num_hosts=2) as board:
        board.post("stop", "SIGTERM")
        assert store.was_asked.wait(DEADLINE_S)
        store.is_gone = False
        store.values[f"{KEY_PREFIX}stuck/0"] = "rollout"
        eventually(lambda: board.read("stuck") == {0: "rollout"})
        assert board.read("stop") == {1: "SIGTERM"}


def test_one_process_keeps_a_board_of_its_own() -> None:
    with StatusBoard(None, host=0) as board:
        board.post("stop", "SIGTERM")
        assert board.read("stop") == {0: "SIGTERM"}
