"""`grpo score`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import (
    handle_errors,
    print_notices,
    print_result,
    refuse_existing,
    require_path,
    resolve,
    show_progress,
)
from app.commands.options import AsJson, Config, Debug, Overrides, Overwrite, PrintConfig
from settings.checks.commands import check_for_score
from settings.checks.unused_settings import unused_adapter_notices
from settings.errors import InputError


def score(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    samples: Annotated[
        Path | None, typer.Option("--input", metavar="FILE.jsonl", help="Samples to score. Required.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Output file. Required.")] = None,
    role: Annotated[
        Literal["policy", "reference", "critic", "reward"],
        typer.Option(help="Network whose logprobs are added; `critic` adds values, `reward` runs reward.functions."),
    ] = "policy",
    check_packing: Annotated[
        bool,
        typer.Option(
            "--check-packing",
            help="First check that packed rows give the same logprobs as one row per sample; if not, exit with code 1.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Add logprobs, values or rewards to the samples in a file."""
    with handle_errors(debug):
        resolved = resolve(config, overrides, print_config=print_config, check=check_for_score)
        samples, out = require_path(samples, "--input"), require_path(out, "--out")
        refuse_existing({"--out": out}, overwrite=overwrite)
        if role == "policy":
            print_notices(unused_adapter_notices(resolved))
        show_progress(f"grpo score: role {role}; loading JAX")
        if role == "reward":
            if check_packing:
                raise InputError("--check-packing needs a model, but --role reward uses none; omit one of them")
            from app.stages.score_rewards import score_rewards

            summary = score_rewards(resolved, input=samples, out=out)
        else:
            from app.stages.score import score_logprobs

            summary = score_logprobs(resolved, input=samples, out=out, role=role, checks_packing=check_packing)
        print_result(summary, as_json=as_json)
