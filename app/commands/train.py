"""The command `grpo train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from app.commands.addresses import name_run
from app.commands.command_support import (
    inherit_run_settings,
    print_notices,
    print_result,
    require_inputs,
    resolve,
    show_progress,
    write,
)
from app.commands.options import Compiles, Config, Overrides, PrintConfig
from app.records.run_directory import Resume, RunDirectory
from settings import InputError, Settings, load
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
            help="Train on saved samples instead of generating them: a file with one step, or a run directory with "
            "all its steps. Without --config, uses the settings of that run and the run name <its name>-replay.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Start from another run's policy with a fresh optimizer; with --from-rollouts, continue from the step "
            "of the checkpoint. Without --config, uses the settings of that run and the run name "
            "<its name>-warm-start.",
        ),
    ] = None,
    allow_changed: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --resume: a setting or section, such as optimizer.learning_rate or algorithm, that may differ "
            "from the run so far although it changes what the run learns. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report of --dry-run as JSON.")] = False,
) -> None:
    """Train a policy with GRPO, PPO or a related algorithm."""
    for option, given, is_usable, needed in (
        ("--json", as_json, dry_run, "--dry-run; the metrics of a run are in its metrics.jsonl"),
        ("--compile", compiles, dry_run, "--dry-run; a run compiles its programs anyway"),
        ("--allow-changed", allow_changed, resume != "never", "--resume auto or must; a new run changes no settings"),
    ):
        if given and not is_usable:
            raise InputError(f"{option} needs {needed}")
    check = check_for_dry_run if dry_run else check_for_train
    run_paths = {"--from-rollouts": from_rollouts, "--checkpoint": checkpoint}
    base = inherit_run_settings(config, run_paths)
    is_replay = from_rollouts is not None
    flags = _new_run_name(base, overrides, is_replay=is_replay) if isinstance(base, ConfigFile) else NO_FLAGS
    derived = resolve(base, overrides, flags=flags, print_config=print_config, check=check)
    settings = (resolved := name_run(derived, resume)).settings
    if resume == "never" and settings.run.name != (taken := derived.settings.run.name):
        print_notices([f"a run {taken} exists, so this one is {settings.run.name}; --resume auto continues the newest"])
    require_inputs(settings, run_paths)
    _check_start(settings, resume=resume, is_replay=is_replay, dry_run=dry_run)
    show_progress(f"grpo train: {settings.run.name}, model {settings.model.path}; loading JAX")
    from app.training.replay import StartRequest

    start = StartRequest(from_rollouts, checkpoint)
    launch = {"resume": resume, "start_request": start, "allow_changed": allow_changed or ()}
    if dry_run:
        from app.preflight.dry_run import make_dry_run_report

        print_result(make_dry_run_report(resolved, **launch, compiles=compiles), as_json=as_json)
        raise typer.Exit
    import jax

    from app.report.before_after import summary_text
    from app.training.train import train

    run = train(resolved, **launch)
    if jax.process_index() == 0:
        write(summary_text(run.metrics, path=str(run.path), best=run.best, early_end=run.early_end), sys.stdout)
    raise typer.Exit(run.exit_code)


def _check_start(settings: Settings, *, resume: Resume, is_replay: bool, dry_run: bool) -> None:
    """Checks the files that the settings name, and ends the command if the run to continue is already finished."""
    from app.commands.named_files import check_train_files, finished_history
    from app.report.before_after import find_best, no_step_left, summary_text

    check_train_files(settings, resume=resume, is_replay=is_replay)
    if resume == "never" or is_replay or dry_run:
        return
    if (history := finished_history(settings)) is not None:
        print_notices([no_step_left(settings.run.steps)])
        path, best = RunDirectory.from_settings(settings.run).path, find_best(history, settings.checkpoint.best_metric)
        write(summary_text(history, path=str(path), best=best), sys.stdout)
        raise typer.Exit


def _new_run_name(config: ConfigFile, overrides: list[str] | None, *, is_replay: bool) -> Flags:
    """Returns flags that rename a run started with another run's settings, unless its name was set explicitly."""
    option, suffix = ("--from-rollouts", "replay") if is_replay else ("--checkpoint", "warm-start")
    resolved = load(config, overrides or [], os.environ)
    if not resolved.provenance["run.name"].startswith("yaml:"):
        return NO_FLAGS
    return {option: ("run.name", f"{resolved.settings.run.name}-{suffix}")}
