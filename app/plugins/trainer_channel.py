"""The pipes between the program of a worker and the trainer, which carry JSON Lines."""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Mapping
from typing import Any

from app.plugins.supervisor import end_worker


class TrainerChannel:
    """The pipes to the trainer. The plug-in itself gets an empty stdin, and its stdout is redirected to stderr."""

    def __init__(self) -> None:
        self._requests = os.fdopen(os.dup(0), "rb")
        self._answers = os.dup(1)
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        os.register_at_fork(after_in_child=self._close_in_child)
        self._sending = threading.Lock()
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Reads requests in a thread, so that an exit of the trainer is noticed while the plug-in runs."""
        for line in self._requests:
            self._lines.put(line)
        end_worker()

    def _close_in_child(self) -> None:
        """Closes the pipe in a forked child, which would otherwise hide this process's exit from the trainer."""
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def receive(self) -> dict[str, Any]:
        return json.loads(self._lines.get())

    def send(self, answer: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(answer).encode() + b"\n")
        with self._sending:
            while data:
                data = data[os.write(self._answers, data) :]
