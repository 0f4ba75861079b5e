"""Counts XLA compilations."""

from __future__ import annotations

import jax


class CompilationCounter:
    """Counts what XLA compiles in this process, from its creation until it is closed; not what a cache on disk has."""

    # Each request has a duration, including those that the cache answers.
    REQUEST, CACHE_HIT = "/jax/core/compile/backend_compile_duration", "/jax/compilation_cache/cache_hits"

    def __init__(self) -> None:
        self._count = 0
        self.seconds = 0.0
        """Total seconds of compiling programs and of loading them."""
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def _on_duration(self, event: str, duration_secs: float, **_: object) -> None:
        if event == self.REQUEST:
            self._count += 1
            self.seconds += duration_secs

    def _on_event(self, event: str, **_: object) -> None:
        self._count -= event == self.CACHE_HIT

    def take_count(self) -> int:
        """Returns the number of compilations since the last call."""
        count, self._count = self._count, 0
        return count

    def close(self) -> None:
        jax.monitoring.unregister_event_duration_listener(self._on_duration)
        jax.monitoring.unregister_event_listener(self._on_event)
