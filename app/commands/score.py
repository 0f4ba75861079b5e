"""The command `grpo score`."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from app.commands.command_support import (
    checked_by_process_0,
    print_notices,
    print_result,
    refuse_existing,
    require_inputs,
    require_path,
    resolve_policy,
    show_progress,
)
from app.commands.options import CHECKPOINT_HELP, AsJson, Config, Overrides, Overwrite, PrintConfig
from app.records.jsonl import check_distinct_paths
from settings import InputError, Resolved
from settings.checks.commands import check_for_score
from settings.checks.unused_settings import SECTIONS_OF_REWARDS, unused_setting_notices

Role = Literal["policy", "reference", "critic", "reward"]
CHECKPOINT_FIELD = re.compile(r"\{(run|step|index)\}")


def score(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help=f"{CHECKPOINT_HELP} Repeatable, with one output file for each."),
    ] = None,
    samples: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE.jsonl|.parquet",
            help="Samples to score, from any program: token ids, or prompt and completion as text or messages. "
            "Required.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Output file. May contain {run}, {step} or {index} (0, 1, ...) of the checkpoint, as in "
            "scored-{step}.jsonl. Required.",
        ),
    ] = None,
    role: Annotated[
        Role,
        typer.Option(help="Network whose logprobs are added; `critic` adds values, `reward` adds rewards."),
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
    is_policy, checkpoints = role == "policy", checkpoint or []
    first = checkpoints[0] if checkpoints else None
    resolved = resolve_policy(
        config, overrides, first, check=check_for_score, print_config=print_config, loads_policy=is_policy
    )
    print_notices(unused_setting_notices(resolved, SECTIONS_OF_REWARDS if role == "reward" else ()))
    samples, out = require_path(samples, "--input"), require_path(out, "--out")
    show_progress(f"grpo score: role {role}; loading JAX")
    summaries = score_file(
        resolved, samples, out, role=role, checkpoints=checkpoints, check_packing=check_packing, overwrite=overwrite
    )
    print_result(summaries[0] if summaries and len(checkpoints) < 2 else summaries, as_json=as_json)


def score_file(
    resolved: Resolved,
    samples: Path,
    out: Path,
    *,
    role: Role,
    checkpoints: Sequence[Path],
    check_packing: bool = False,
    overwrite: bool = False,
) -> list[dict[str, Any]] | None:
    """Scores the samples of a file and returns the summary of each output; on processes other than 0, returns None.

    Args:
        out: the output; with several checkpoints a pattern with `{run}`, `{step}` or `{index}`.
        check_packing: whether to check packed rows first; see `score_tokens`.
        overwrite: whether existing outputs are replaced.

    Raises:
        InputError: an output exists and must not be replaced, two checkpoints have the same output, or the output is a
            pattern but there is no checkpoint.
    """
    if not checkpoints:
        if field := CHECKPOINT_FIELD.search(str(out)):
            raise InputError(
                f"--out: {field[0]} is replaced only with --checkpoint; add --checkpoint, or remove {field[0]}"
            )
        refuse_existing({"--out": out}, overwrite=overwrite)
    require_inputs(resolved.settings, {"--input": samples})
    if checkpoints and role in ("reference", "reward"):
        of_reference = "reference.path" if resolved.settings.reference.path else "model.path"
        weights = of_reference if role == "reference" else "reward.model"
        raise InputError(f"--checkpoint: --role {role} uses only the weights of {weights}; omit one of the two options")
    if role == "reward":
        if check_packing:
            raise InputError("--check-packing compares logprobs, but --role reward has none; omit one of them")
        from app.stages.score_rewards import score_rewards

        summary = score_rewards(resolved, input=samples, out=out)
        return None if summary is None else [summary]
    from app.checkpoint.saved_policy import PolicyCheckpoint
    from app.runtime.pinned_revisions import pin_revisions
    from app.stages.score import score_tokens

    saved = [PolicyCheckpoint.open(path) for path in checkpoints]
    outputs: dict[Path, PolicyCheckpoint | None] = {} if saved else {out: None}
    for index, one in enumerate(saved):
        values = {"run": one.run.path.name, "step": str(one.step), "index": str(index)}
        file = Path(CHECKPOINT_FIELD.sub(lambda match, values=values: values[match[1]], str(out)))
        if file in outputs:
            raise InputError(
                f"--out: {file} would contain the scores of two checkpoints (the second is {one.path}); give each its "
                "own file with {step}, {run} or {index} (the checkpoint's number, from 0) in the name"
            )
        refuse_existing({"--out": file}, overwrite=overwrite)
        with checked_by_process_0() as is_checked:
            if is_checked and len(saved) > 1:  # Each checkpoint reads the input again.
                check_distinct_paths({"--input": samples, "--out": file})
        outputs[file] = one
    if saved:
        resolved = dataclasses.replace(resolved, settings=pin_revisions(resolved.settings, saved[0].run))
    return score_tokens(resolved, input=samples, outputs=outputs, role=role, checks_packing=check_packing)
