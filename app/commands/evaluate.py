"""The command `grpo evaluate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.command_support import print_notices, print_result, refuse_existing, resolve_policy, show_progress
from app.commands.options import AsJson, Checkpoint, Config, Overrides, Overwrite, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_evaluation
from settings.checks.unused_settings import SECTIONS_OF_ROLLOUTS, unused_setting_notices


def evaluate(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Checkpoint = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="File for the samples, which --compare reads.",
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(
            metavar="BEFORE.jsonl AFTER.jsonl",
            rich_help_panel="Comparison",
            help="Only compare two sample files prompt by prompt: outputs of --out, or files in a run's eval/.",
            show_default=False,
        ),
    ] = None,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png", rich_help_panel="Comparison", help="File for a plot of the comparison. Needs --compare."
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Measure a model on held-out prompts, or compare results.

    Reports accuracy, pass@k, maj@k, format rate and truncated fraction with 95 % intervals. Uses data.eval_*, eval.*
    and the first of reward.functions, as training does. pass@k and maj@k need eval.num_samples above 1 and
    eval.temperature above 0.
    """
    if compare is not None:
        given = {"--config": config, "--set": overrides, "--print-config": print_config}
        for option, value in {**given, "--checkpoint": checkpoint, "--out": out}.items():
            if value:
                raise InputError(
                    f"{option} cannot be combined with --compare, which reads only files; omit one of them"
                )
        refuse_existing({"--picture": picture}, overwrite=overwrite)
        from app.evaluation.compare import compare_evaluations

        result = compare_evaluations(*compare, plot_path=picture)
        print_notices([] if picture is None else [f"--picture: written to {picture}"])
    else:
        if picture is not None:
            raise InputError("--picture plots a comparison; add --compare BEFORE.jsonl AFTER.jsonl, or omit --picture")
        resolved = resolve_policy(config, overrides, checkpoint, check=check_for_evaluation, print_config=print_config)
        print_notices(unused_setting_notices(resolved, (*SECTIONS_OF_ROLLOUTS, "reward.")))
        refuse_existing({"--out": out}, overwrite=overwrite)
        from app.commands.named_files import check_named_files

        settings = resolved.settings
        evaluated = settings.data.eval_source
        held_out = [("data.eval_source", evaluated) if evaluated else ("data.source", settings.data.sources[0].source)]
        check_named_files(settings, held_out, judges=[one.function for one in settings.reward.functions[:1]])
        show_progress(f"grpo evaluate: model {resolved.settings.model.path}; loading JAX")
        from app.evaluation.standalone import evaluate_model

        result = evaluate_model(resolved, checkpoint=checkpoint, out=out)
    print_result(result, as_json=as_json)
