"""Reports a run to the console, the run log, wandb and the final report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collective_files import gather_samples_to_process_0
from app.distributed.collectives import gather_bytes_to_process_0
from app.records.atomic_write import write_atomic
from app.records.run_directory import RunDirectory
from app.records.sample import Messages, Sample, group_samples, message_text
from app.records.text_format import to_printable
from app.records.typed_values import to_text
from app.report.alerts import Alert, AlertMonitor
from app.report.metrics_history import training_steps
from app.report.write_report import write_report
from app.tracking.console import ProgressDisplay, evaluation_line
from app.tracking.rollout_timeline import Timeline, write_timeline
from app.tracking.run_log import NullRunLog, RunLog, samples_to_jsonl
from app.tracking.run_mirror import RunMirror
from settings.schema.run import LoggingSettings

log = logging.getLogger(__name__)
NUM_GROUPS = 2
"""Number of groups of which samples are printed; more lines would push the progress off the screen."""
PROMPT_CHARACTERS, COMPLETION_CHARACTERS, NAME_CHARACTERS = 160, 320, 40
"""Maximum lengths of printed texts; the files in `rollouts/` contain the whole texts."""


@dataclass
class RunReporter:
    """Reports steps, samples, evaluations and alerts to the console and the files of a run."""

    run: RunDirectory
    settings: LoggingSettings
    display: ProgressDisplay
    run_log: RunLog | NullRunLog
    timeline: Callable[[], Timeline | None]
    """Returns the timeline of the last step's rollout on this host, if there is one."""
    mirror: RunMirror | None = None
    """Copies the run to its bucket; None without a bucket."""
    _alerts: AlertMonitor = field(init=False)

    def __post_init__(self) -> None:
        self._alerts = AlertMonitor(self.run_log.history)

    def report_step(self, step: int, record: dict[str, Any]) -> None:
        """Reports the metrics of a step, and the alerts that they raise, to the console and the run log."""
        alerts = self.write_metrics(step, record)
        self.display.show_step(step, record)
        for alert in alerts:
            self.display.show_alert(alert)
            self.run_log.alert(alert)
        if self.mirror is not None:
            self.mirror.request()

    def write_metrics(self, step: int, metrics: dict[str, Any]) -> list[Alert]:
        """Writes the metrics of a step to the run log and returns the alerts that they raise."""
        self.run_log.write_metrics(step, metrics)
        return self._alerts.observe({"step": step, **metrics})

    def report_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Saves the samples of a step, and prints some of them every few steps. All hosts must call it together."""
        if self.settings.save_rollouts:
            self._write_samples(self.run.rollouts_path(step), samples, step=step)
        every = self.settings.completions_every_steps
        if every and (step == 1 or step % every == 0):
            self.display.print_lines(sample_lines(gather_samples_to_process_0(samples), step=step))

    def report_evaluation(self, step: int, metrics: dict[str, Any], samples: Sequence[Sample]) -> None:
        """Saves the samples of an evaluation and shows its metrics. All hosts must call it together."""
        self._write_samples(self.run.evaluation_path(step), samples, step=step)
        self.display.print_line(evaluation_line(step, metrics))

    def _write_samples(self, path: Path, samples: Sequence[Sample], *, step: int) -> None:
        """Writes the samples of all hosts into one file, whose content does not depend on the number of hosts."""
        lines = gather_bytes_to_process_0(samples_to_jsonl(samples, step=step))
        if jax.process_index() == 0:
            path.parent.mkdir(exist_ok=True)
            write_atomic(path, b"".join(lines))

    def write_final_report(self) -> None:
        """Writes the report and the timeline of a finished or stopped run; failures are only logged."""
        if not self.settings.report or not training_steps(self.run_log.history):
            return
        self.display.set_phase("report")
        with _warn_if_unwritten("timeline"):
            if (timeline := self.timeline()) is not None:
                write_timeline(self.run.timeline_path, timeline)
        with _warn_if_unwritten("report", advice=f"; try again with `grpo report {self.run.path}`"):
            self.display.print_line(f"report: {write_report(self.run.path)['report']}")


@contextmanager
def _warn_if_unwritten(what: str, *, advice: str = "") -> Iterator[None]:
    """Logs any exception of the `with` block as a warning: `what` could not be written."""
    try:
        yield
    # Every exception: a failing page must not change how a run ends.
    except Exception as error:
        log.warning("the %s could not be written (%s: %s)%s", what, type(error).__name__, error, advice)


def sample_lines(samples: Sequence[Sample], *, step: int) -> list[str]:
    """Formats the best and the worst sample of the `NUM_GROUPS` groups with the largest reward std."""
    selected = sorted(group_samples(samples), key=lambda group: -np.std([*map(_reward_or_zero, group)]))[:NUM_GROUPS]
    lines = [f"completions of step {step}"] if selected else []
    for group in selected:
        best, worst = max(group, key=_reward_or_zero), min(group, key=_reward_or_zero)
        # The graded answer is at the end of a solution.
        graded = (to_text(best.prompt.answer) or "–").strip().rpartition("\n")[2]
        answer = truncate_middle(graded, limit=NAME_CHARACTERS)
        lines.append(f"  {truncate_middle(_prompt_text(best.prompt.source), limit=PROMPT_CHARACTERS)}  [{answer}]")
        lines += [f"    {_to_text(sample)}" for sample in ([best] if best is worst else [best, worst])]
    return lines


def _reward_or_zero(sample: Sample) -> float:
    return sample.reward if sample.reward is not None else 0.0


def _to_text(sample: Sample) -> str:
    written = sample.advantages[sample.mask] if sample.advantages is not None else np.empty(0)
    numbers = {"reward": sample.reward, **(sample.rewards or {}), "advantage": written.mean() if len(written) else None}
    figures = (
        f"{truncate_middle(name, limit=NAME_CHARACTERS)} {'–' if value is None else f'{value:.4g}'}"
        for name, value in numbers.items()
    )
    end = truncate_middle(sample.finish_reason, limit=NAME_CHARACTERS)
    return f"{', '.join(figures)}, {end}: {_written_text(sample)}"


def _written_text(sample: Sample) -> str:
    """Returns the shortened completion or, for an episode, the policy's turns and the messages between them."""
    texts = [sample.completion]
    if sample.episode is not None:
        texts = []
        for turn in sample.episode.turns:
            texts += [turn.text, *(f"{one['role']}: {message_text(one)}" for one in turn.messages)]
    limit = max(NAME_CHARACTERS, COMPLETION_CHARACTERS // max(1, len(texts)))
    return " → ".join(truncate_middle(text, limit=limit) for text in texts)


def _prompt_text(source: str | Messages) -> str:
    if isinstance(source, str):
        return source
    return message_text(source[-1]) if source and isinstance(source[-1], dict) else ""


def truncate_middle(text: str, *, limit: int) -> str:
    """Returns a text as one printable line, without its middle if it is longer than `limit` characters."""
    if len(text) > limit:
        head = limit * 2 // 3
        text = f"{text[:head]} … {text[-(limit - head) :]}"
    return to_printable(text)
