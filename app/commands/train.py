"""`grpo train`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from app.commands.command_support import (
    inherit_run_settings,
    print_result,
    reset_inherited,
    resolve,
    show_progress,
)
from app.commands.options import Compiles, Config, Overrides, PrintConfig
from app.records.run_directory import Resume
from app.records.settings_history import SettingsPeriod
from settings import InputError, Resolved, load
from settings.checks.commands import check_for_dry_run, check_for_train
from settings.loading.config_file import ConfigFile
from settings.loading.sources import NO_FLAGS, Flags


def train(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    resume: Annotated[
        Resume,
        typer.Option(
            help="Continue from the newest checkpoint of the run directory if there is one (auto), "
            "refuse a used directory (never), or refuse a directory without a checkpoint (must)."
        ),
    ] = "never",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Run every launch check, print sizes and memory, and exit.")
    ] = False,
    compiles: Compiles = False,
    from_rollouts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Train on saved samples instead of generating them: a file holds one step, a run directory all its "
            "steps. Without --config, uses the settings of that run and the run name <its name>-replay.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --from-rollouts: start from a checkpoint of another run instead of step 0."
        ),
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --resume: a setting or section, such as optimizer.learning_rate or algorithm, that may differ "
            "from the run so far although it changes what the run learns; or metrics.jsonl, to continue although this "
            "file is damaged. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report of --dry-run as JSON.")] = False,
) -> None:
    """Train by rollout, reward, score, advantage and update."""
    if as_json and not dry_run:
        raise InputError("--json needs --dry-run; the metrics of a run are in its metrics.jsonl")
    if compiles and not dry_run:
        raise InputError("--compile needs --dry-run; a run compiles its programs anyway")
    if checkpoint is not None and from_rollouts is None:
        raise InputError("--checkpoint needs --from-rollouts; to continue a run, use --resume")
    if allow_changed and resume == "never":
        raise InputError("--allow-changed needs --resume auto or must; a new run has no earlier settings")
    check = check_for_dry_run if dry_run else check_for_train
    run_paths = {"--from-rollouts": from_rollouts, "--checkpoint": checkpoint}
    base, overrides_of_base, periods = inherit_run_settings(config, overrides, run_paths)
    flags = _replay_run_name(base, overrides_of_base) if isinstance(base, ConfigFile) else NO_FLAGS
    resolved = resolve(base, overrides_of_base, flags=flags, print_config=print_config, check=check)
    show_progress(f"grpo train: {resolved.settings.run.name}, model {resolved.settings.model.path}; loading JAX")
    from app.training.replay import ReplayRequest
    from app.training.replay_parts import ReplayPart, replay_parts, train_parts

    parts = [ReplayPart(resolved, request=None, changed=())]
    if from_rollouts is not None:
        request = ReplayRequest(from_rollouts, checkpoint, periods)
        parts = replay_parts(request, lambda period: _resolve_period(period, overrides, resolved, check), resolved)
    if dry_run:
        from app.preflight.dry_run import make_dry_run_report

        report = make_dry_run_report(
            parts[0].resolved,
            resume=resume,
            replay_request=parts[0].request,
            allow_changed=allow_changed or (),
            compiles=compiles,
        )
        print_result(report, as_json=as_json)
        raise typer.Exit
    code = train_parts(parts, resume=resume, allow_changed=allow_changed or ())
    raise typer.Exit(code)


def _resolve_period(
    period: SettingsPeriod, overrides: list[str] | None, replay: Resolved, check: Callable[[Resolved], None]
) -> Resolved:
    """Returns the settings of a period, in the run directory of the replay."""
    overrides = reset_inherited(period.file, overrides)
    resolved = resolve(period.file, overrides, print_config=False, check=check)
    place = resolved.settings.run.model_copy(update={"name": replay.settings.run.name, "dir": replay.settings.run.dir})
    return dataclasses.replace(resolved, settings=resolved.settings.model_copy(update={"run": place}))


def _replay_run_name(config: ConfigFile, overrides: list[str] | None) -> Flags:
    """Returns flags that rename a replay with another run's settings, unless its name was set explicitly."""
    resolved = load(config, overrides or [], os.environ)
    if not resolved.provenance["run.name"].startswith("yaml:"):
        return NO_FLAGS
    return {"--from-rollouts": ("run.name", f"{resolved.settings.run.name}-replay")}
