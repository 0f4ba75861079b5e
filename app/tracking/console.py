"""Console output of a run: a live progress bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from app.records.sample import Sample
from app.records.text_format import to_printable_lines
from app.report.alerts import Alert
from app.report.before_after import format_metric
from app.report.metrics_history import accuracy_is_plug_in_mean, finite_metric, matching_metric_names
from app.rollout.scheduling.sample_states import ENDED, SampleState, SampleTable

log = logging.getLogger(__name__)

ANNOUNCED_PHASES = {"compile": "compiling the programs of the first phases", "evaluate": "evaluating"}
"""Long phases, logged when they begin if there is no terminal."""
REDRAW_INTERVAL_S, LOG_INTERVAL_S = 0.1, 10.0
"""Intervals between states of a rollout on a terminal, and between its lines elsewhere."""


def step_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Returns the main metrics of a step in one line."""
    # None while only the critic is trained.
    entropy, loss = metrics["policy/entropy"], metrics["loss"]
    learned = "critic only" if loss is None else f"entropy {entropy:.3f}  loss {loss:+z.4f}"
    return (
        f"step {step:>5}  reward {metrics['reward/mean']:z.3f}  length {metrics['completions/mean_length']:.1f}  "
        f"{learned}  {metrics['time/step_s']:.2f} s "
        f"({metrics['perf/tokens_per_s']:.0f} tokens/s)"
    )


def evaluation_line(step: int, metrics: Mapping[str, Any]) -> str:
    """Returns the metrics of an evaluation in one line."""
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
    """Returns a line with the number of samples in each state of a rollout."""
    counts = samples.counts
    active, waiting, suspended, acting = (
        counts[state] for state in (SampleState.RUNNING, SampleState.NEW, SampleState.SUSPENDED, SampleState.ACTING)
    )
    outside = f"{suspended} suspended" + (f"  {acting} acting" if acting else "")
    return f"{active} active  {waiting} waiting  {outside}  {_num_done(samples)} of {len(samples.entries)} done"


def _num_done(samples: SampleTable) -> int:
    """Returns the number of samples that have ended."""
    return sum(samples.counts[state] for state in ENDED)


class ProgressDisplay:
    """Shows the phase, the progress and the last step's metrics on stderr. Silent unless `enabled`.

    Args:
        on_phase: called with the name of each phase.
    """

    def __init__(
        self, *, num_steps: int, first_step: int, enabled: bool, on_phase: Callable[[str], None] = lambda phase: None
    ):
        self._entered = on_phase
        # Live on a terminal only: a notebook would keep every state of a bar.
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
        """Metrics of the last step."""

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print_line(self, text: str, *, style: str | None = None) -> None:
        self._console.print(to_printable_lines(text), style=style, markup=False, soft_wrap=True)

    def show_alert(self, alert: Alert) -> None:
        self.print_line(f"alert at step {alert.step}: {alert.title}\n  {alert.text}", style="yellow")

    def print_lines(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.print_line(text)

    def set_phase(self, name: str) -> None:
        self._entered(name)
        if name in ANNOUNCED_PHASES and not (self._live or self._console.quiet):
            log.info(ANNOUNCED_PHASES[name])
        self._progress.update(self._task, description=name, figures=self._figures)

    def update_rollout(self, samples: SampleTable) -> None:
        """Shows the state of a scheduled rollout after an event."""
        if self._live:
            self._progress.update(self._task, figures=rollout_status(samples))

    def show_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._live:
            self._figures = (
                f"reward {metrics['reward/mean']:z.3f}  {metrics['time/step_s']:.2f} s/step  "
                f"{metrics['perf/tokens_per_s']:.0f} tokens/s"
            )
            self._progress.update(self._task, completed=step, figures=self._figures)
        else:
            self.print_line(step_line(step, metrics))


class RolloutProgress(ProgressDisplay):
    """Shows the progress of one rollout: a bar of its samples on a terminal, otherwise a line every ten seconds.

    Args:
        clock: returns a monotonic time in seconds.
    """

    def __init__(self, *, num_samples: int, enabled: bool = True, clock: Callable[[], float] = time.monotonic):
        super().__init__(num_steps=num_samples, first_step=0, enabled=enabled)
        self.set_phase("rollout")
        self._num_samples, self._clock = num_samples, clock
        self._next = clock() + (0.0 if self._live else LOG_INTERVAL_S)
        self._first: tuple[float, int] | None = None
        """Time and number of tokens at the first count."""

    def update_rollout(self, samples: SampleTable) -> None:
        if self._is_due():
            self._show(_num_done(samples), sum(entry.num_tokens for entry in samples), rollout_status(samples))

    def track(self, samples: Iterator[Sample]) -> Iterator[Sample]:
        """Yields the samples of a rollout without a scheduler, and shows how many are done."""
        num_tokens = 0
        for number, sample in enumerate(samples, start=1):
            num_tokens += len(sample.completion_ids)
            if self._is_due():
                self._show(number, num_tokens, f"{number} of {self._num_samples} done")
            yield sample

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
