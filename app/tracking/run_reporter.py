"""What a run tells while it goes on and when it ends: on the terminal, in its journal, to wandb, in its report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.distributed.collectives import bytes_to_first_host
from app.distributed.lockstep import samples_to_first_host
from app.records.run_directory import RunDirectory
from app.records.sample import Sample
from app.report.alerts import Watch
from app.report.completions_table import completions_table
from app.report.metrics_history import training_steps
from app.report.write_report import write_report
from app.tracking.console import Board, evaluation_line
from app.tracking.run_log import Journal, NoJournal, lines_of
from settings.schema.logging import Logging

log = logging.getLogger(__name__)


@dataclass
class Narrator:
    """Tells the same story to the board and the journal."""

    run: RunDirectory
    settings: Logging
    board: Board
    journal: Journal | NoJournal
    _watch: Watch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = Watch(self.journal.history)

    def step(self, step: int, record: dict[str, Any]) -> None:
        """A step's figures, and what is wrong with them."""
        self.journal.write(step, record)
        self.board.step(step, record)
        for alert in self._watch.observe({"step": step, **record}):
            self.board.alert(alert)
            self.journal.alert(alert)

    def samples(self, step: int, samples: Sequence[Sample]) -> None:
        """A step's samples of all hosts, and some of them on the board where it is their turn. Every host tells."""
        if self.settings.save_rollouts:
            self._save(self.run.rollouts(step), samples)
        every = self.settings.completions_every_steps
        if every and (step == 1 or step % every == 0):
            table = completions_table(samples_to_first_host(samples), step=step)
            self.board.completions(table)
            self.journal.completions(table)

    def evaluation(self, step: int, metrics: dict[str, Any], samples: Sequence[Sample]) -> None:
        """As `samples`, of held-out prompts."""
        self._save(self.run.evaluation(step), samples)
        self.board.say(evaluation_line(step, metrics))

    def _save(self, path: Path, samples: Sequence[Sample]) -> None:
        """The file is the same whatever the number of hosts."""
        self.journal.write_lines(path, bytes_to_first_host(lines_of(samples)))

    def report(self) -> None:
        """The report of what there is, however the run ended."""
        if not self.settings.report or not training_steps(self.journal.history):
            return
        self.board.phase("report")
        try:
            self.board.say(f"report: {write_report(self.run.path)['report']}")
        # Blanket, as nothing else here: the report is a convenience, and no bug in it may decide how a run has ended.
        except Exception as error:
            log.warning(
                "the report could not be written (%s: %s); `grpo report %s` tries again",
                type(error).__name__,
                error,
                self.run.path,
            )
