"""The command `grpo rollout`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.command_support import (
    print_notices,
    print_result,
    refuse_existing,
    require_path,
    resolve_policy,
    show_progress,
)
from app.commands.options import AsJson, Checkpoint, Config, Overrides, Overwrite, PrintConfig
from settings.checks.commands import check_for_rollout
from settings.checks.unused_settings import SECTIONS_OF_ROLLOUTS, unused_setting_notices


def rollout(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Checkpoint = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON Lines file with prompts to use instead of data.source.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Use only the first N prompts.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Output file for the samples. Required.")
    ] = None,
    timeline: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.html", help="File for a plot of every decode slot over time.")
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Sample completions; run again to continue after a stop."""
    resolved = resolve_policy(config, overrides, checkpoint, check=check_for_rollout, print_config=print_config)
    print_notices(unused_setting_notices(resolved, SECTIONS_OF_ROLLOUTS))
    out = require_path(out, "--out")
    refuse_existing({"--out": out}, overwrite=overwrite, resumes=True)
    refuse_existing({"--timeline": timeline}, overwrite=overwrite)
    from app.commands.named_files import check_named_files

    sources = [("data.source", one.source) for one in resolved.settings.data.sources]
    check_named_files(resolved.settings, [("--prompts", str(prompts))] if prompts else sources)
    show_progress(f"grpo rollout: model {resolved.settings.model.path}; loading JAX")
    from app.stages import rollout

    summary = rollout.rollout(resolved, prompts=prompts, limit=limit, out=out, timeline=timeline, checkpoint=checkpoint)
    print_result(summary, as_json=as_json)
