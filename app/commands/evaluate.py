"""`grpo evaluate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from app.commands.command_support import (
    handle_errors,
    inherit_run_settings,
    print_notices,
    print_result,
    resolve,
    show_progress,
)
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_evaluation
from settings.checks.unused_settings import unused_adapter_notices
from settings.loading.resolve import NO_CALLABLES

if TYPE_CHECKING:
    from app.evaluation.printed_summary import EvaluationSummary


def evaluate(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint to evaluate: <run>/checkpoints/<step> or best, or a run directory for its newest "
            "checkpoint. Without --config, the settings of that run are used.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="File for the samples. An interrupted evaluation continues from it; a finished one is not repeated.",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="BEFORE.jsonl AFTER.jsonl",
            help="Only compare two files, each written by --out or to a run's eval/, prompt by prompt.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png|.svg", help="File for a plot of the comparison. Needs --compare."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a model on held-out prompts: accuracy, pass@k, maj@k, format and truncation, with 95 % intervals.

    Uses data.eval_*, eval.* and the first of reward.functions, as training does. pass@k and maj@k need
    eval.num_samples above 1 and eval.temperature above 0.
    """
    with handle_errors(debug):
        if compare is not None:
            given = {"--config": config, "--set": overrides, "--print-config": print_config}
            for option, value in {**given, "--checkpoint": checkpoint, "--out": out}.items():
                if value:
                    raise InputError(f"{option} cannot be combined with --compare, which only reads two files")
            from app.evaluation.compare import compare_evaluations

            result = compare_evaluations(*compare, plot_path=picture)
        else:
            if picture is not None:
                raise InputError("--picture needs --compare BEFORE.jsonl AFTER.jsonl")
            result = run_evaluation(config, overrides, checkpoint=checkpoint, out=out, print_config=print_config)
        print_result(result, as_json=as_json)


def run_evaluation(
    config: str | None,
    overrides: list[str] | None,
    *,
    checkpoint: Path | None,
    out: Path | None,
    callables: Mapping[str, Callable[..., Any]] = NO_CALLABLES,
    print_config: bool = False,
) -> EvaluationSummary | None:
    """Evaluates a model or a checkpoint and returns the summary; None on all hosts but the first."""
    base, overrides = inherit_run_settings(config, overrides, {"--checkpoint": checkpoint})
    resolved = resolve(base, overrides, print_config=print_config, check=check_for_evaluation, callables=callables)
    if checkpoint is None:
        print_notices(unused_adapter_notices(resolved))
    show_progress(f"grpo evaluate: model {resolved.settings.model.path}; loading JAX")
    from app.evaluation.standalone import evaluate_model

    return evaluate_model(resolved, checkpoint=checkpoint, out=out)
