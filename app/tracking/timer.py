"""Times a step and its phases."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import jax

from app.tracking.console import ProgressDisplay


@dataclass
class StepTimer:
    """Wall-clock seconds of each phase of a step, and of the step since the timer was created."""

    display: ProgressDisplay
    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)
    """When the step began, by `time.perf_counter`."""
    _within: list[str] = field(default_factory=list)
    """Active phases, the innermost last."""

    def stop(self) -> None:
        self.seconds["time/step_s"] = time.perf_counter() - self.start

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.display.set_phase(name)
        self._within.append(name)
        start = time.perf_counter()
        with jax.profiler.TraceAnnotation(name):
            yield
        key = f"time/{name}_s"
        # A phase may run several times in a step.
        self.seconds[key] = self.seconds.get(key, 0.0) + time.perf_counter() - start
        self._within.pop()
        if self._within:
            self.display.set_phase(self._within[-1])
