"""A replay of a run whose settings were changed by a resume: each part is trained under its own settings."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from app.checkpoint.saved_policy import PolicyCheckpoint
from app.distributed.preemption import EXIT_CODES
from app.records.run_directory import Resume, RunDirectory
from app.records.settings_history import SettingsPeriod, decisive_periods
from app.tracking.summary import summary_text
from app.training.replay import ReplayRequest, find_source_run
from app.training.train import train
from settings import Resolved
from settings.checks.resumed_settings import changed_settings

log = logging.getLogger(__name__)


class ReplayPart(NamedTuple):
    """Steps under the same settings."""

    resolved: Resolved
    request: ReplayRequest | None
    """None for a run that generates its samples, which has a single part."""
    changed: Sequence[str]
    """Names of the settings that differ from those of the part before."""


def replay_parts(
    request: ReplayRequest, resolve: Callable[[SettingsPeriod], Resolved], last: Resolved
) -> list[ReplayPart]:
    """Returns the parts of a replay that are still to be trained, at least one.

    Args:
        resolve: returns the settings for the replay of an earlier period, in the run directory of `last`.
        last: the settings for the replay of the last period.
    """
    periods = decisive_periods(request.source_periods)
    if len(periods) < 2 or find_source_run(request.rollouts) is None:
        return [ReplayPart(last, request, changed=())]
    resolved = [*map(resolve, periods[:-1]), last]
    ends = [*(period.first_step for period in periods[1:]), resolved[-1].settings.run.steps + 1]
    ends = [min(end, one.settings.run.steps + 1) for end, one in zip(ends, resolved, strict=True)]
    steps = [range(period.first_step, end) for period, end in zip(periods, ends, strict=True)]
    run = RunDirectory.from_settings(last.settings.run)
    start = 0 if request.checkpoint is None else PolicyCheckpoint.open(request.checkpoint).step
    done = max(run.checkpoint_steps, default=start)
    trained = [i for i, part in enumerate(steps) if part] or [0]
    num_steps = steps[trained[-1]].stop - 1
    # A finished replay is resumed under the settings of its end.
    pending = [i for i in trained if steps[i].stop - 1 > done] or trained[-1:]
    requests = {i: request._replace(steps=steps[i], num_steps=num_steps) for i in pending}
    later = [(resolved[i].settings, requests[i]) for i in pending[1:]]
    requests[pending[0]] = requests[pending[0]]._replace(later=later)
    return [
        ReplayPart(
            resolved[i],
            requests[i],
            [change.name for change in changed_settings(periods[i - 1].settings, periods[i].settings)] if i else [],
        )
        for i in pending
    ]


def train_parts(parts: Sequence[ReplayPart], *, resume: Resume, allow_changed: Sequence[str]) -> int:
    """Trains one part after the other, prints a summary of each, and returns the exit code of the last one.

    Several hosts end after each part with the code of a preemption, because a process can join them only once.
    """
    for number, part in enumerate(parts):
        allowed = (*allow_changed, *part.changed)
        run = train(
            part.resolved, resume=resume if number == 0 else "must", replay_request=part.request, allow_changed=allowed
        )
        if jax.process_index() == 0:
            print(summary_text(run.metrics, path=str(run.path), best=run.best, early_end=run.early_end), flush=True)
        if run.exit_code or run.early_end or part is parts[-1]:
            return run.exit_code
        if jax.process_count() > 1:
            log.warning("the settings of the samples' run change after this step; --resume auto goes on under them")
            return EXIT_CODES[signal.SIGTERM]
    raise AssertionError("a replay has at least one part")
