"""`grpo score`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

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
from settings.checks.commands import check_for_score
from settings.checks.unused_settings import unused_adapter_notices
from settings.errors import InputError
from settings.loading.resolve import NO_CALLABLES

Role = Literal["policy", "reference", "critic", "reward"]


def score(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint with the policy or critic to score with: <run>/checkpoints/<step> or best, or a run "
            "directory for its newest checkpoint. Without --config, the settings of that run are used.",
        ),
    ] = None,
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
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Add logprobs, values or rewards to the samples in a file."""
    with handle_errors(debug):
        files = {"checkpoint": checkpoint, "samples": samples, "out": out}
        flags = {"check_packing": check_packing, "print_config": print_config}
        print_result(run_score(config, overrides, role=role, **files, **flags), as_json=as_json)


def run_score(
    config: str | None,
    overrides: list[str] | None,
    *,
    role: Role,
    checkpoint: Path | None,
    samples: Path | None,
    out: Path | None,
    callables: Mapping[str, Callable[..., Any]] = NO_CALLABLES,
    check_packing: bool = False,
    print_config: bool = False,
) -> dict[str, Any] | None:
    """Scores a file of samples into `out` and returns the summary; None on all hosts but the first."""
    if checkpoint is not None and role not in ("policy", "critic"):
        weights = "model.path" if role == "reference" else "reward.model"
        raise InputError(
            f"--checkpoint holds a policy and perhaps a critic, but --role {role} uses only the weights of {weights}; "
            "omit it, and use --config RUN/settings.yaml for the settings of a run"
        )
    base, overrides = inherit_run_settings(config, overrides, {"--checkpoint": checkpoint})
    resolved = resolve(base, overrides, print_config=print_config, check=check_for_score, callables=callables)
    samples, out = require_path(samples, "--input"), require_path(out, "--out")
    if role == "policy" and checkpoint is None:
        print_notices(unused_adapter_notices(resolved))
    show_progress(f"grpo score: role {role}; loading JAX")
    if role == "reward":
        if check_packing:
            raise InputError("--check-packing needs a model, but --role reward uses none; omit one of them")
        from app.stages.score_rewards import score_rewards

        return score_rewards(resolved, input=samples, out=out)
    from app.stages.score import score_logprobs

    saved = None
    if checkpoint is not None:
        from app.checkpoint.saved_policy import PolicyCheckpoint

        saved = PolicyCheckpoint.open(checkpoint)
    return score_logprobs(resolved, input=samples, out=out, role=role, checks_packing=check_packing, checkpoint=saved)
