"""Cancellation of a rollout before its samples are complete."""

from __future__ import annotations

from collections.abc import Callable

StopCheck = Callable[[], bool]
"""Returns whether generation must stop at the end of the current segment. Thread-safe; once true, it stays true."""

STOP_CHECK_INTERVAL_S = 1.0
"""Maximum time between stop checks while waiting for anything other than devices."""


class StoppedError(Exception):
    """Generation was stopped before its samples were complete."""

    def __init__(self) -> None:
        super().__init__("generation was stopped before its samples were complete")


def never_stop() -> bool:
    """Returns False: generation is never stopped."""
    return False
