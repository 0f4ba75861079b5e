"""How a rollout ends before its samples are done."""

from __future__ import annotations

from collections.abc import Callable

StopCheck = Callable[[], bool]
"""Whether generation is to end at the next edge of a segment. Asked from any thread; once true, it stays so."""


class StoppedError(Exception):
    """Generation was asked to stop; the samples that it was to give are not there."""

    def __init__(self) -> None:
        super().__init__("generation was asked to stop")


def never_stop() -> bool:
    """Nobody asks."""
    return False
