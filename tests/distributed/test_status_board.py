"""Tests the status that hosts share, and that hosts exit together."""

import atexit
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import pytest

from app.distributed import shutdown
from app.distributed.shutdown import coordinated_shutdown, exit_barrier
from app.distributed.status_board import KEY_PREFIX, StatusBoard
from settings.errors import InputError
from tests.program import DEADLINE_S, wait_for


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


def test_the_last_status_posted_by_a_host_reaches_all_hosts() -> None:
    store = Shared()
    with StatusBoard(store, host=0, num_hosts=2) as first, StatusBoard(store, host=1, num_hosts=2) as second:
        second.post("stop", "early")
        second.post("stop", "late")
        first.post("stuck", "rollout")
        assert second.read("stop") == {1: "late"}
        wait_for(lambda: first.read("stop") == {1: "late"} and second.read("stuck") == {0: "rollout"})
        assert first.read("failed") == {}


def test_status_board_recovers_after_its_store_was_unreachable() -> None:
    store = Shared()
    store.is_gone = True
    with StatusBoard(store, host=1, num_hosts=2) as board:
        board.post("stop", "SIGTERM")
        assert store.was_asked.wait(DEADLINE_S)
        store.is_gone = False
        store.values[f"{KEY_PREFIX}stuck/0"] = "rollout"
        wait_for(lambda: board.read("stuck") == {0: "rollout"})
        assert board.read("stop") == {1: "SIGTERM"}


def ending(board: StatusBoard) -> AbstractContextManager[None]:
    return coordinated_shutdown(board, enter_phase=lambda _: None)


def end_together(errors: Sequence[Exception | None], monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[Any]]:
    """Returns the errors of hosts, as threads, that end with these errors or without one, and their exit handlers."""
    store, exits = Shared(), []
    monkeypatch.setattr(shutdown, "COMMON_FAILURE_WINDOW_S", 3.0)
    monkeypatch.setattr(atexit, "register", lambda *handler: exits.append(handler[1:]))

    def end(host: int) -> str:
        with StatusBoard(store, host=host, num_hosts=len(errors)) as board:
            try:
                with ending(board):
                    if (error := errors[host]) is not None:
                        raise error
                    exit_barrier(board)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
        return ""

    with ThreadPoolExecutor(len(errors)) as pool:
        return list(pool.map(end, range(len(errors)))), exits


def test_hosts_end_together_whether_all_finish_or_all_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    assert end_together([None, None], monkeypatch) == (["", ""], [])
    ours, theirs = KeyError("ours"), InputError("theirs")
    assert end_together([ours, theirs], monkeypatch) == (["KeyError: 'ours'", "InputError: theirs"], [])


@pytest.mark.parametrize(("error", "code"), [(InputError("mine"), 2), (RuntimeError("mine"), 1)])
def test_a_host_that_fails_alone_exits_without_the_others(error, code, monkeypatch):
    monkeypatch.setattr(shutdown, "COMMON_FAILURE_WINDOW_S", 0.1)
    store, exits = Shared(), []
    monkeypatch.setattr(atexit, "register", lambda *handler: exits.append(handler[1]))
    with StatusBoard(store, host=1, num_hosts=2) as board, pytest.raises(type(error)), ending(board):
        raise error
    assert exits == [code]
    assert store.values[f"{KEY_PREFIX}leaving/1"] == "mine"
    with StatusBoard(store, host=0, num_hosts=2) as board, pytest.raises(RuntimeError, match="host 1 has failed: mine"):
        exit_barrier(board)
