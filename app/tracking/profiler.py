"""Traces of single steps with `jax.profiler` for `logging.profile_steps`; a failure does not end the run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from contextlib import ExitStack
from pathlib import Path

import jax

log = logging.getLogger(__name__)

PROFILER_ERRORS = (OSError, RuntimeError, ValueError)
"""Errors of the profiler: the folder cannot be written to, the backend fails, or another trace is running."""


class StepProfiler:
    """Traces this process during the selected steps, each into its own folder.

    If the profiler fails, a warning is logged and no further steps are traced.
    """

    def __init__(self, steps: Collection[int], trace_dir: Callable[[int], Path]):
        self._steps = frozenset(steps)
        self._folder_of = trace_dir
        self._running = ExitStack()

    def start(self, step: int) -> None:
        """Begins a trace if the step is selected."""
        if step not in self._steps:
            return
        try:
            jax.profiler.start_trace(self._folder_of(step))
        except PROFILER_ERRORS as error:
            self._disable(error)
            return
        self._running.callback(self._write)
        self._running.enter_context(jax.profiler.StepTraceAnnotation("step", step_num=step))

    def stop(self) -> None:
        """Ends the trace and writes it, if one is running."""
        self._running.close()

    def _write(self) -> None:
        try:
            jax.profiler.stop_trace()
        except PROFILER_ERRORS as error:
            self._disable(error)

    def _disable(self, error: Exception) -> None:
        log.warning("logging.profile_steps: the profiler failed; no further steps are traced: %s", error)
        self._steps = frozenset()
