"""Shows a run on the console: one line per step and, on a terminal, a progress bar below the lines."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.records.text_format import format_percent, to_printable_lines
from app.report.alerts import Alert
from app.report.before_after import format_metric
from app.report.metrics_history import accuracy_is_plug_in_mean, finite_metric, matching_metric_names
from app.rollout.scheduling.sample_states import ENDED, SampleState, SampleTable
from app.runtime.session import Session

log = logging.getLogger(__name__)

ANNOUNCED_PHASES = {"compile": "compiling the programs of the first phases", "evaluate": "evaluating"}
"""Messages for long phases, logged when a phase begins if there is no terminal."""
REDRAW_INTERVAL_S, LOG_INTERVAL_S = 0.1, 10.0
"""Seconds between updates of a rollout's status: on a terminal, and in lines of a log."""
MAX_SILENCE_S, POLL_INTERVAL_S = 60.0, 1.0
"""Without a terminal: seconds without a line after which the phase is printed, and seconds between checks of this."""
NUM_TIMED_STEPS = 10
"""Number of recent steps used to estimate the remaining time."""


def step_line(step: int, metrics: Mapping[str, Any], *, num_steps: int, left_s: float) -> str:
    """Formats the main metrics of a step and the remaining time as one line.

    Args:
        metrics: maps names to values; the policy's metrics are None while only the critic is trained.
        left_s: estimated seconds until the run ends.
    """
    parts = [f"step {step:>{len(str(num_steps))}}/{num_steps}"]
    if "reward/mean" in metrics:
        parts += [f"reward {metrics['reward/mean']:z.3f}", f"length {metrics['completions/mean_length']:.1f}"]
    if metrics["loss"] is None:
        parts.append("critic only")
    else:
        parts += [f"entropy {metrics['policy/entropy']:.3f}", f"loss {metrics['loss']:+z.4f}"]
        for name, label in (("policy/kl", "kl"), ("policy/teacher_kl", "kl to the teacher")):
            if (kl := metrics.get(name)) is not None:
                parts.append(f"{label} {kl:z.4f}")
        # With one update per step, nothing is clipped.
        if clipped := sum(metrics.get(f"policy/clip_fraction_{bound}", 0.0) for bound in ("low", "high")):
            parts.append(f"clipped {format_percent(clipped)}")
        parts += [f"grad {metrics['policy/grad_norm']:.3g}", f"lr {metrics['policy/learning_rate']:.3g}"]
    parts.append(f"{metrics['time/step_s']:.2f} s ({metrics['perf/tokens_per_s']:.0f} tokens/s)")
    return "  ".join(parts) + (f"  {timedelta(seconds=round(left_s))} left" if step < num_steps else "")


def evaluation_line(step: int, metrics: Mapping[str, Any]) -> str:
    by_plug_in = accuracy_is_plug_in_mean([metrics])

    def shown(name: str) -> str:
        return format_metric(name, finite_metric(metrics, name), by_plug_in=by_plug_in)

    levels = "".join(
        f"  {name.removeprefix('eval/accuracy/')} {shown(name)}"
        for name in matching_metric_names([metrics], "eval/accuracy/", "")
    )
    form = "" if by_plug_in else f"format {shown('eval/format_rate')}  "
    return (
        f"evaluation at step {step}: accuracy {shown('eval/accuracy')}{levels}  {form}"
        f"truncated {shown('eval/truncated_fraction')}  length {shown('eval/mean_length')}"
    )


def rollout_status(samples: SampleTable) -> str:
    """Returns one line with the number of samples in each state of a scheduled rollout."""
    counts = samples.counts
    active, waiting, suspended, acting = (
        counts[state] for state in (SampleState.RUNNING, SampleState.NEW, SampleState.SUSPENDED, SampleState.ACTING)
    )
    outside = f"{suspended} suspended" + (f"  {acting} acting" if acting else "")
    return f"{active} active  {waiting} waiting  {outside}  {_num_done(samples)} of {len(samples.entries)} done"


def _num_done(samples: SampleTable) -> int:
    return sum(samples.counts[state] for state in ENDED)


class ProgressDisplay:
    """Shows steps and the current phase on stderr: with a progress bar on a terminal, otherwise as lines.

    Args:
        enabled: False shows nothing.
        on_phase: called with the name of each phase when it begins.
        clock: returns a monotonic time in seconds.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        first_step: int,
        enabled: bool,
        on_phase: Callable[[str], None] = lambda phase: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._entered, self._num_steps, self._clock = on_phase, num_steps, clock
        # Bars only on a terminal: a notebook would keep every state of a bar.
        self._live = sys.stderr.isatty()
        self._console = Console(
            stderr=True, quiet=not enabled, highlight=False, force_terminal=self._live, force_jupyter=False
        )
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not (enabled and self._live),
        )
        self._task = self._progress.add_task("start", total=num_steps, completed=first_step, figures="")
        self._figures = ""
        """Text next to the progress bar: metrics of the last step."""
        self._phase, self._status = "", ""
        """The name of the phase, and the state of its samples as text."""
        self._phase_began = self._last_line = clock()
        self._step_ends = deque[float](maxlen=NUM_TIMED_STEPS + 1)
        self._closed = threading.Event()

    def __enter__(self) -> Self:
        self._progress.start()
        if not (self._live or self._console.quiet):
            threading.Thread(target=self._break_silence, name="progress", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._progress.stop()

    def _break_silence(self) -> None:
        while not self._closed.wait(POLL_INTERVAL_S):
            self.show_wait()

    def show_wait(self) -> None:
        """Prints the current phase and its duration if no line has been printed for `MAX_SILENCE_S`."""
        now, name = self._clock(), ANNOUNCED_PHASES.get(self._phase, self._phase)
        if now - self._last_line >= MAX_SILENCE_S:
            self.print_line(f"{name}: {now - self._phase_began:.0f} s so far{self._status and f', {self._status}'}")

    def print_line(self, text: str, *, style: str | None = None) -> None:
        self._last_line = self._clock()
        self._console.print(to_printable_lines(text), style=style, markup=False, soft_wrap=True)

    def show_alert(self, alert: Alert) -> None:
        self.print_line(f"alert at step {alert.step}: {alert.title}\n  {alert.text}", style="yellow")

    def print_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.print_line(text)

    def set_phase(self, name: str) -> None:
        self._entered(name)
        self._phase, self._status, self._phase_began = name, "", self._clock()
        if name in ANNOUNCED_PHASES and not (self._live or self._console.quiet):
            log.info(ANNOUNCED_PHASES[name])
            self._last_line = self._phase_began
        self._progress.update(self._task, description=name, figures=self._figures)

    def follow(self, session: Session) -> None:
        """Shows the progress of every later rollout and evaluation of the session."""
        if session.workers is not None:
            session.workers.on_progress = self.update_rollout
        if session.continuous_batching is not None:
            session.continuous_batching.on_progress = self.update_samples

    def update_rollout(self, samples: SampleTable) -> None:
        """Shows the states of a scheduled rollout's samples; called after each scheduler event."""
        self._status = rollout_status(samples)
        self._progress.update(self._task, figures=self._status)

    def update_samples(self, num_done: int, num_samples: int, num_tokens: int) -> None:
        """Shows the number of finished samples; called after each segment of a rollout without a scheduler."""
        self._status = f"{num_done} of {num_samples} done"
        self._progress.update(self._task, figures=self._status)

    def show_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        now = self._clock()
        if not self._step_ends:
            self._step_ends.append(now - metrics["time/step_s"])
        self._step_ends.append(now)
        pace_s = (now - self._step_ends[0]) / (len(self._step_ends) - 1)
        left_s = pace_s * (self._num_steps - step)
        self.print_line(step_line(step, metrics, num_steps=self._num_steps, left_s=left_s))
        name, key = ("reward", "reward/mean") if "reward/mean" in metrics else ("loss", "loss")
        self._figures = f"{name} {metrics[key]:z.3f}  {metrics['time/step_s']:.2f} s/step"
        self._progress.update(self._task, completed=step, figures=self._figures)


class RolloutProgress(ProgressDisplay):
    """Shows how many samples of a rollout are finished: as a bar on a terminal, otherwise in a line every 10 s."""

    def __init__(self, *, num_samples: int, enabled: bool = True, clock: Callable[[], float] = time.monotonic):
        super().__init__(num_steps=num_samples, first_step=0, enabled=enabled, clock=clock)
        self.set_phase("compile")
        self._next = clock() + (0.0 if self._live else LOG_INTERVAL_S)
        self._first: tuple[float, int] | None = None
        """Time and tokens at the first update, from which tokens/s are counted."""

    def follow(self, session: Session) -> None:
        super().follow(session)
        for note in session.generation_notes:
            self.print_line(note)
        self.set_phase("rollout")

    def update_rollout(self, samples: SampleTable) -> None:
        if self._is_due():
            self._show(_num_done(samples), sum(entry.num_tokens for entry in samples), rollout_status(samples))

    def update_samples(self, num_done: int, num_samples: int, num_tokens: int) -> None:
        if self._is_due():
            self._show(num_done, num_tokens, f"{num_done} of {num_samples} done")

    def _is_due(self) -> bool:
        return self._first is None or self._clock() >= self._next

    def _show(self, num_done: int, num_tokens: int, status: str) -> None:
        now = self._clock()
        start, before = self._first = self._first or (now, num_tokens)
        rate = f"  {(num_tokens - before) / (now - start):,.0f} tokens/s" if now > start else ""
        if self._live:
            self._progress.update(self._task, completed=num_done, figures=status + rate)
            self._next = now + REDRAW_INTERVAL_S
        elif now >= self._next:
            self.print_line(f"rollout: {status}{rate}")
            self._next = now + LOG_INTERVAL_S
