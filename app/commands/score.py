"""`grpo score`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.commands.command_support import print_result, refuse_existing, require_path, resolve_policy, show_progress
from app.commands.options import AsJson, Checkpoint, Config, Overrides, Overwrite, PrintConfig
from settings import InputError, Resolved
from settings.checks.commands import check_for_score

Role = Literal["policy", "reference", "critic", "reward"]


def score(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Checkpoint = None,
    samples: Annotated[
        Path | None, typer.Option("--input", metavar="FILE.jsonl", help="Samples to score. Required.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", help="Output file. Required.")] = None,
    role: Annotated[
        Role,
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
) -> None:
    """Add logprobs, values or rewards to the samples in a file."""
    is_policy = role == "policy"
    resolved = resolve_policy(
        config, overrides, checkpoint, check=check_for_score, print_config=print_config, loads_policy=is_policy
    )
    samples, out = require_path(samples, "--input"), require_path(out, "--out")
    refuse_existing({"--out": out}, overwrite=overwrite)
    show_progress(f"grpo score: role {role}; loading JAX")
    summary = score_file(resolved, samples, out, role=role, checkpoint=checkpoint, check_packing=check_packing)
    print_result(summary, as_json=as_json)


def score_file(
    resolved: Resolved, samples: Path, out: Path, *, role: Role, checkpoint: Path | None, check_packing: bool = False
) -> dict[str, Any] | None:
    """Scores a file for a role and returns the summary; None on all hosts but the first."""
    if checkpoint is not None and role in ("reference", "reward"):
        weights = "model.path" if role == "reference" else "reward.model"
        raise InputError(f"--checkpoint: --role {role} uses only the weights of {weights}; omit one of the two options")
    if role == "reward":
        if check_packing:
            raise InputError("--check-packing needs a model, but --role reward uses none; omit one of them")
        from app.stages.score_rewards import score_rewards

        return score_rewards(resolved, input=samples, out=out)
    from app.checkpoint.saved_policy import PolicyCheckpoint
    from app.runtime.pinned_revisions import pin_revisions
    from app.stages.score import score_logprobs

    saved = None if checkpoint is None else PolicyCheckpoint.open(checkpoint)
    if saved is not None:
        resolved = dataclasses.replace(resolved, settings=pin_revisions(resolved.settings, saved.run))
    return score_logprobs(resolved, input=samples, out=out, role=role, checks_packing=check_packing, checkpoint=saved)
