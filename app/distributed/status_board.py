"""Status board: short notices that hosts exchange at any time, without waiting for each other.

Collectives exchange values at fixed points of the program. A notice, such as of a signal or a hang, can be posted at
any time; it is sent through the key-value store of `jax.distributed`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

import jax
from jax._src import distributed  # JAX has no public API for its store

POLL_INTERVAL_S = 0.5
"""Interval between reads of the store."""

KEY_PREFIX = "grpo/"


class StatusBoard:
    """The latest notice of each host under each topic. Context manager: while open, a thread polls the store.

    Args:
        store: JAX's client of the shared store, which raises RuntimeError if process 0 cannot be reached; None for a
            single host, whose board is local.
    """

    def __init__(self, store: Any, *, host: int, num_hosts: int = 1):
        self.host = host
        self.num_hosts = num_hosts
        self._store = store
        self._notices: dict[tuple[str, int], str] = {}
        self._outgoing: SimpleQueue[tuple[str, str] | None] = SimpleQueue()
        # A daemon thread: an unanswered call to process 0 must not prevent this process from exiting.
        self._thread = threading.Thread(target=self._sync_loop, name="status-board", daemon=True)

    def __enter__(self) -> StatusBoard:
        if self._store is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._store is not None:
            self._outgoing.put(None)
            self._thread.join(2 * POLL_INTERVAL_S)

    def post(self, topic: str, text: str) -> None:
        """Replaces this host's notice under a topic; the new one is sent in the background."""
        self._notices[topic, self.host] = text
        self._outgoing.put((topic, text))

    def read(self, topic: str) -> Mapping[int, str]:
        """Returns the latest notice of each host under a topic, as known here. Thread-safe; does not block."""
        return {host: text for (about, host), text in list(self._notices.items()) if about == topic}

    def read_others(self, topic: str) -> Mapping[int, str]:
        """Returns the notices of the other hosts; see `read`."""
        return {host: text for host, text in self.read(topic).items() if host != self.host}

    def _sync_loop(self) -> None:
        next_poll_s = 0.0
        while True:
            # JAX's heartbeat ends a host that cannot reach process 0.
            with suppress(RuntimeError):
                try:
                    notice = self._outgoing.get(timeout=max(next_poll_s - time.monotonic(), 0.0))
                except Empty:
                    next_poll_s = time.monotonic() + POLL_INTERVAL_S
                    for key, text in self._store.key_value_dir_get(KEY_PREFIX):
                        topic, host = key.removeprefix(KEY_PREFIX).split("/")
                        self._notices[topic, int(host)] = text
                    continue
                if notice is None:
                    return
                topic, text = notice
                self._store.key_value_set(f"{KEY_PREFIX}{topic}/{self.host}", text, allow_overwrite=True)


def open_status_board() -> StatusBoard:
    """Returns the board shared by all processes. Call `jax_startup.initialize_distributed` first."""
    store = distributed.global_state.client if jax.process_count() > 1 else None
    return StatusBoard(store, host=jax.process_index(), num_hosts=jax.process_count())
