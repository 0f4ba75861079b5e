"""`grpo train`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from app.commands.command_support import format_json, handle_errors, inherit_run_settings, resolve, show_progress, write
from app.commands.options import Config, Debug, Overrides, PrintConfig
from settings import InputError, load
from settings.checks.commands import check_for_dry_run, check_for_train
from settings.loading.sources import NO_FLAGS, Flags

if TYPE_CHECKING:
    from app.training.replay import ReplayRequest


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
    from_rollouts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE|DIR",
            help="Learn from saved samples and generate none: a file is one step, a run's folder all its steps. "
            "Without --config under that run's settings, as <its name>-replay.",
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --from-rollouts: start from the state of another run's checkpoint, not step 0."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print what --dry-run finds as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model: rollout, reward, score, advantage, update, again and again."""
    with handle_errors(debug):
        if as_json and not dry_run:
            raise InputError("--json goes with --dry-run; a run's figures are in its metrics.jsonl")
        if checkpoint is not None and from_rollouts is None:
            raise InputError("--checkpoint goes with --from-rollouts; a run is continued with --resume")
        check = check_for_dry_run if dry_run else check_for_train
        named = config
        places = {"--from-rollouts": from_rollouts, "--checkpoint": checkpoint}
        config, overrides = inherit_run_settings(named, overrides, places)
        flags = NO_FLAGS if config == named else _replay_run_name(config, overrides)
        resolved = resolve(config, overrides, flags=flags, print_config=print_config, check=check)
        if dry_run:
            from app.preflight.dry_run import make_dry_run_report

            found = make_dry_run_report(
                resolved, resume=resume, replay_request=_replay_request(from_rollouts, checkpoint)
            )
            if found is not None:
                write(format_json(found.to_dict()) if as_json else found.to_text(), sys.stdout)
            raise typer.Exit
        show_progress(f"grpo train: {resolved.settings.run.name}, model {resolved.settings.model.path}; loading JAX")
        from app.training import train

        code = train.train(resolved, resume=resume, replay_request=_replay_request(from_rollouts, checkpoint))
    raise typer.Exit(code)


def _replay_run_name(config: str | None, overrides: list[str] | None) -> Flags:
    """Of a run under another one's settings: the name there is taken, unless somebody has said another."""
    resolved = load(config, overrides or [], os.environ)
    if not resolved.provenance["run.name"].startswith("yaml:"):
        return NO_FLAGS
    return {"--from-rollouts": ("run.name", f"{resolved.settings.run.name}-replay")}


def _replay_request(rollouts: Path | None, checkpoint: Path | None) -> ReplayRequest | None:
    from app.training.replay import ReplayRequest

    return None if rollouts is None else ReplayRequest(rollouts, checkpoint)
