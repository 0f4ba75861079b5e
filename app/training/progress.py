"""What a person sees while a run goes on: a live board on a terminal, one line per step elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def step_line(step: int, metrics: Mapping[str, Any]) -> str:
    """The figures of a step worth a line."""
    return (
        f"step {step:>5}  reward {metrics['reward/mean']:.3f}  length {metrics['completions/mean_length']:.1f}  "
        f"entropy {metrics['policy/entropy']:.3f}  loss {metrics['loss']:+.4f}  {metrics['time/step_s']:.2f} s "
        f"({metrics['perf/tokens_per_s']:.0f} tokens/s)"
    )


def evaluation_line(step: int, metrics: Mapping[str, Any]) -> str:
    levels = "".join(
        f"  {name.removeprefix('eval/accuracy/')} {value:.1%}"
        for name, value in metrics.items()
        if name.startswith("eval/accuracy/")
    )
    form = "" if metrics["eval/format_rate"] is None else f"format {metrics['eval/format_rate']:.1%}  "
    return (
        f"evaluation at step {step}: accuracy {metrics['eval/accuracy']:.1%}{levels}  {form}"
        f"truncated {metrics['eval/truncated_fraction']:.1%}  "
        f"length {metrics['eval/mean_length']:.1f}"
    )


class Board:
    """Phase, progress and the last step's figures, on stderr. Silent where `shown` is False."""

    def __init__(self, *, num_steps: int, first_step: int, shown: bool):
        self._console = Console(stderr=True, quiet=not shown, highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description:<10}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            disable=not (shown and self._live),
        )
        self._task = self._progress.add_task("start", total=num_steps, completed=first_step, figures="")

    def __enter__(self) -> Board:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def tell(self, texts: Iterable[str]) -> None:
        for text in texts:
            self.say(text)

    def phase(self, name: str) -> None:
        self._progress.update(self._task, description=name)

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._live:
            figures = (
                f"reward {metrics['reward/mean']:.3f}  {metrics['time/step_s']:.2f} s/step  "
                f"{metrics['perf/tokens_per_s']:.0f} tokens/s"
            )
            self._progress.update(self._task, completed=step, figures=figures)
        else:
            self.say(step_line(step, metrics))
