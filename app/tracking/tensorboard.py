"""Writes metrics and texts to TensorBoard in the calling thread.

tensorboardX's `SummaryWriter` has a thread, which a full disk ends, and later calls wait for it forever.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]


class TensorBoardWriter:
    """Appends events to a new file in a folder.

    Args:
        next_step: first step of this session; TensorBoard hides events of this step and later steps from earlier files.
    """

    def __init__(self, folder: Path, *, next_step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # The name that the library makes differs only after a second.
        self._events = EventsWriter(str(folder / "events"), f".{time.time_ns()}")
        self._write(next_step, session_log=SessionLog(status=SessionLog.START))

    def add_scalars(self, values: Mapping[str, float], step: int) -> None:
        scalars = [summary.scalar(name, value).value[0] for name, value in values.items()]
        self._write(step, summary=summary.Summary(value=scalars))

    def add_text(self, title: str, text: str, step: int) -> None:
        self._write(step, summary=summary.text(title, text))

    def _write(self, step: int, **content: object) -> None:
        self._events.write_event(Event(wall_time=time.time(), step=step, **content))
        self._events.flush()

    def close(self) -> None:
        self._events.close()
