"""Counts XLA compilations."""

from __future__ import annotations

import jax


class CompilationCounter:
    """Counts the XLA compilations of this process, from its creation until it is closed."""

    EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self._count = 0
        self.seconds = 0.0
        """Total seconds of all compilations."""
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        if event == self.EVENT:
            self._count += 1
            self.seconds += duration_secs

    def take_count(self) -> int:
        """Returns the number of compilations since the last call."""
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_event)
