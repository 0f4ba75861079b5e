"""`grpo rollout`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from app.commands.command_support import (
    handle_errors,
    inherit_run_settings,
    print_notices,
    print_result,
    require_path,
    resolve,
    show_progress,
)
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings.checks.commands import check_for_rollout
from settings.checks.unused_settings import unused_adapter_notices


def rollout(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint to sample from: <run>/checkpoints/<step> or best, or a run directory for its newest "
            "checkpoint. Without --config, the settings of that run are used.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Lines file with prompts to use instead of data.source."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Use only the first N prompts.")] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Output file. Required.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg|.html", help="File for a plot of all slots over time.")
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Sample completions and write them as JSON Lines. Run the command again to continue an interrupted rollout."""
    with handle_errors(debug):
        files = {"checkpoint": checkpoint, "prompts": prompts, "out": out, "timeline": timeline}
        print_result(run_rollout(config, overrides, limit=limit, print_config=print_config, **files), as_json=as_json)


def run_rollout(
    config: str | None,
    overrides: list[str] | None,
    *,
    checkpoint: Path | None,
    prompts: Path | None,
    limit: int | None,
    out: Path | None,
    timeline: Path | None = None,
    print_config: bool = False,
) -> dict[str, Any] | None:
    """Runs a rollout into `out` and returns its summary; None on all hosts but the first."""
    base, overrides = inherit_run_settings(config, overrides, {"--checkpoint": checkpoint})
    resolved = resolve(base, overrides, print_config=print_config, check=check_for_rollout)
    out = require_path(out, "--out")
    if checkpoint is None:
        print_notices(unused_adapter_notices(resolved))
    show_progress(f"grpo rollout: model {resolved.settings.model.path}; loading JAX")
    from app.stages import rollout

    return rollout.rollout(resolved, prompts=prompts, limit=limit, out=out, timeline=timeline, checkpoint=checkpoint)
