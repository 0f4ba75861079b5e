"""Console output of a run: a live progress bar on a terminal, one line per step elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from app.records.text_format import to_printable_lines
from app.report.alerts import Alert
from app.report.before_after import format_metric
from app.report.metrics_history import accuracy_is_plug_in_mean, finite_metric, matching_metric_names
from app.rollout.scheduling.sample_states import ENDED, SampleState, SampleTable
from app.tracking.completions_table import CompletionsTable, truncate_middle

log = logging.getLogger(__name__)

PROMPT_CELL, COMPLETION_CELL, ANSWER_CELL = 120, 240, 40
"""Maximum number of characters in a cell of the table."""
ANNOUNCED_PHASES = {"compile": "compiling the programs of the first phases", "evaluate": "evaluating"}
"""Long phases, logged when they begin if there is no terminal."""
LOG_WIDTH = 120
"""Line width if there is no terminal and COLUMNS is not set."""


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


def render_completions(table: CompletionsTable) -> Table:
    """Renders completions for a terminal. Every cell is a `Text`, so that model output is not parsed as markup."""
    view = Table(title=f"completions of step {table.step}", title_justify="left", expand=True)
    view.add_column("prompt", ratio=3, overflow="fold")
    view.add_column("completion", ratio=4, overflow="fold")
    for name in (*table.reward_names, "reward", "advantage"):
        view.add_column(Text(truncate_middle(name, limit=20)), justify="right", overflow="fold")
    view.add_column("gold", overflow="fold")
    view.add_column("end")
    for group in table.groups:
        for prompt, completion, *numbers, answer, finish in group:
            view.add_row(
                Text(truncate_middle(prompt, limit=PROMPT_CELL)),
                Text(truncate_middle(completion, limit=COMPLETION_CELL)),
                *("–" if value is None else f"{value:.4g}" for value in numbers),
                Text(truncate_middle(answer or "–", limit=ANSWER_CELL)),
                "cut" if finish == "length" else Text(truncate_middle(finish, limit=20)),
            )
        view.add_section()
    return view


def rollout_status(samples: SampleTable) -> str:
    """Returns a line with the number of samples in each state of a rollout."""
    counts = samples.counts
    active, waiting, suspended, acting = (
        counts[state] for state in (SampleState.RUNNING, SampleState.NEW, SampleState.SUSPENDED, SampleState.ACTING)
    )
    outside = f"{suspended} suspended" + (f"  {acting} acting" if acting else "")
    return f"{active} active  {waiting} waiting  {outside}  {num_done(samples)} of {len(samples.entries)} done"


def num_done(samples: SampleTable) -> int:
    """Returns the number of samples that have ended."""
    return sum(samples.counts[state] for state in ENDED)


def stderr_console(*, enabled: bool) -> Console:
    """Returns a console on stderr, which is live on a terminal only: a notebook would keep every state of a bar."""
    is_terminal = sys.stderr.isatty()
    return Console(stderr=True, quiet=not enabled, highlight=False, force_terminal=is_terminal, force_jupyter=False)


class ProgressDisplay:
    """Shows the phase, the progress and the last step's metrics on stderr. Silent unless `enabled`.

    Args:
        on_phase: called with the name of each phase.
    """

    def __init__(
        self, *, num_steps: int, first_step: int, enabled: bool, on_phase: Callable[[str], None] = lambda phase: None
    ):
        self._entered = on_phase
        self._console = stderr_console(enabled=enabled)
        if not self._console.is_terminal and "COLUMNS" not in os.environ:
            self._console.width = LOG_WIDTH
        self._live = self._console.is_terminal
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

    def __enter__(self) -> ProgressDisplay:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def print_line(self, text: str) -> None:
        self._console.print(to_printable_lines(text), markup=False, soft_wrap=True)

    def show_alert(self, alert: Alert) -> None:
        self._console.print(
            to_printable_lines(f"alert at step {alert.step}: {alert.title}\n  {alert.text}"),
            style="yellow",
            markup=False,
            soft_wrap=True,
        )

    def show_completions(self, table: CompletionsTable) -> None:
        self._console.print(render_completions(table))

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
