"""Starts the program of a worker process and connects it to the trainer with pipes that carry JSON Lines.

{"memory_mib": 4096, <what to load>}  ->  {"loaded": {...}} or {"refused": "why"}
{"key": 7, <a request to job 7>}      ->  {"key": 7, <its answer>, or "failure": [kind, text]}
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from app.plugins.loading import LoadError, describe_error
from app.plugins.supervisor import end_worker, limit_memory, supervise

PlugIn = TypeVar("PlugIn")


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
        """Closes the pipe in a forked child; an open copy would hide this process's exit from the trainer."""
        if self._answers >= 0:
            os.close(self._answers)
        self._answers = -1

    def end_forked_child(self) -> None:
        """Ends this process if it is a child forked by the plug-in that has returned from the plug-in's code."""
        if self._answers < 0:
            os._exit(0)

    def receive(self) -> dict[str, Any]:
        return json.loads(self._lines.get())

    def send(self, answer: Mapping[str, Any]) -> None:
        data = memoryview(json.dumps(answer).encode() + b"\n")
        with self._sending:
            while data:
                data = data[os.write(self._answers, data) :]


def start(
    load: Callable[[dict[str, Any]], tuple[PlugIn, Mapping[str, Any]]],
) -> tuple[TrainerChannel, PlugIn]:
    """Starts supervision, limits memory, loads the plug-in, and reports to the trainer. Exits if loading fails.

    Args:
        load: returns the plug-in named in the trainer's first message, and its description for the trainer.

    Returns:
        The pipes to the trainer, and the plug-in.
    """
    supervise()
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    channel = TrainerChannel()
    order = channel.receive()
    unlimited = limit_memory(order["memory_mib"] * 2**20)
    try:
        plug_in, description = load(order)
    except BaseException as error:  # including sys.exit
        channel.send({"refused": str(error) if isinstance(error, LoadError) else describe_error(error)})
        sys.exit()
    channel.send({"loaded": {**description, "unlimited": unlimited}})
    return channel, plug_in
