"""`grpo train`."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import typer

from settings import InputError
from settings.checks import check_for_dry_run, check_for_train
from verbs.answering import errors_for_people, json_text, resolve, write
from verbs.options import Config, Debug, Overrides, PrintConfig


def train(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    resume: Annotated[
        Literal["auto", "never", "must"],
        typer.Option(
            help="Continue the run directory's newest checkpoint: if there is one (auto), "
            "refuse a used directory (never), refuse one without (must)."
        ),
    ] = "never",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all that a launch does, print sizes and memory, and stop."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what --dry-run finds as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model: rollout, reward, score, advantage, update, again and again."""
    with errors_for_people(debug):
        if as_json and not dry_run:
            raise InputError("--json goes with --dry-run; a run's figures are in its metrics.jsonl")
        check = check_for_dry_run if dry_run else check_for_train
        resolved = resolve(config, overrides, print_config=print_config, check=check)
        if dry_run:
            from app.training.dry_run import look_ahead

            found = look_ahead(resolved, resume=resume)
            if found is not None:
                write(json_text(found.to_dict()) if as_json else found.to_text(), sys.stdout)
            raise typer.Exit
        from app.training import run

        code = run.train(resolved, resume=resume)
    raise typer.Exit(code)
