"""Times a step and its phases, and profiles the steps of `logging.profile_steps`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import jax

from app.tracking.console import ProgressDisplay

log = logging.getLogger(__name__)
PROFILER_ERRORS = (OSError, RuntimeError, ValueError)
"""Exceptions of JAX's profiler: the folder cannot be written to, the backend fails, or another trace is running."""


@dataclass
class StepTimer:
    """Measures the wall-clock seconds of a step, which begins when the timer is created, and of each phase."""

    display: ProgressDisplay
    seconds: dict[str, float] = field(default_factory=dict)
    start: float = field(default_factory=time.perf_counter)
    """Time of `time.perf_counter` when the step began."""
    _within: list[str] = field(default_factory=list)
    """Names of the active phases, from the outermost to the innermost."""

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


class StepProfiler:
    """Writes a profiler trace of this process for each selected step, into one folder per step.

    If the profiler fails, a warning is logged and no further steps are traced.
    """

    def __init__(self, steps: Collection[int], trace_dir: Callable[[int], Path]):
        self._steps = frozenset(steps)
        self._folder_of = trace_dir
        self._running = ExitStack()

    def start(self, step: int) -> None:
        """Begins a trace if `step` is selected."""
        if step not in self._steps:
            return
        options = jax.profiler.ProfileOptions()
        # A trace keeps at most a million events, and Python calls would displace the devices' events.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._folder_of(step), profiler_options=options)
        except PROFILER_ERRORS as error:
            self._disable(error)
            return
        self._running.callback(self._write)
        self._running.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step))

    def stop(self) -> None:
        """Ends and writes the trace, if one is running."""
        self._running.close()

    def _write(self) -> None:
        try:
            jax.profiler.stop_trace()
        except PROFILER_ERRORS as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        log.warning("logging.profile_steps: the profiler failed; no further steps are traced: %s", error)
        self._steps = frozenset()
