"""`grpo rollout`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from app.commands.command_support import (
    format_json,
    format_summary,
    handle_errors,
    print_notices,
    require_path,
    resolve,
    show_progress,
    write,
)
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_rollout, check_for_simulation
from settings.checks.unused_settings import unused_adapter_notices


def rollout(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Lines of prompts instead of data.source."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first prompts.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Where the samples go, required; what --simulate finds, as JSON."),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE.jsonl",
            help="Sample nothing; compare all schedules on the lengths of a file: samples as --out has them, an event "
            "log, or lines of uid, prompt, index, length, prompt_length.",
        ),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="What decoding costs for --simulate.  [default: a 7B model on an H200]"),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png|.svg|.html", help="Draw what every slot of rollout.scheduler or --simulate does."
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Keep the event log of rollout.scheduler, which --simulate reads."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Sample completions and write them as JSON Lines."""
    with handle_errors(debug):
        check = check_for_rollout if simulate is None else check_for_simulation
        resolved = resolve(config, overrides, print_config=print_config, check=check)
        for option, given, wanted in (
            ("--cost", cost, True),
            *(("--prompts", prompts, False), ("--limit", limit, False), ("--log", log, False)),
        ):
            if given is not None and wanted != (simulate is not None):
                raise InputError(f"{option} goes {'with' if wanted else 'without'} --simulate")
        if simulate is not None:
            from app.stages.simulate import simulate as compare_schedules

            found = compare_schedules(resolved, trace=simulate, cost=cost, out=out, timeline=timeline)
            write(format_json(found.to_dict()) if as_json else found.to_text(), sys.stdout)
            raise typer.Exit
        out = require_path(out, "--out")
        print_notices(unused_adapter_notices(resolved))
        show_progress(f"grpo rollout: model {resolved.settings.model.path}; loading JAX")
        from app.stages import rollout

        summary = rollout.rollout(resolved, prompts=prompts, limit=limit, out=out, timeline=timeline, log=log)
        if summary is not None:
            write(format_summary(summary, as_json=as_json), sys.stdout)
