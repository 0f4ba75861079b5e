"""`grpo score`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import as_text, errors_for_people, required, resolve, tell, write
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings.checks.commands import check_for_score
from settings.checks.unused_settings import adapters_left_out


def score(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    samples: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE.jsonl", help="Samples to score. Required."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Where the scored samples go. Required.")
    ] = None,
    role: Annotated[
        Literal["policy", "reference", "critic", "reward"],
        typer.Option(help="Whose logprobs to add; `critic` adds values, `reward` runs reward.functions."),
    ] = "policy",
    check_packing: Annotated[
        bool,
        typer.Option(
            "--check-packing", help="First see whether samples score in a shared row as they do alone; exit 1 if not."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Add logprobs, values or rewards to the samples of a file."""
    with errors_for_people(debug):
        resolved = resolve(config, overrides, print_config=print_config, check=check_for_score)
        samples, out = required(samples, "--input"), required(out, "--out")
        if role == "policy":
            tell(adapters_left_out(resolved))
        from app.stages import score

        summary = score.score(resolved, input=samples, out=out, role=role, checks_packing=check_packing)
        if summary is not None:
            write(as_text(summary, as_json=as_json), sys.stdout)
