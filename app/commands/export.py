"""The command `grpo export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import (
    find_run_settings,
    print_result,
    require_inputs,
    require_path,
    resolve,
    show_progress,
)
from app.commands.options import AsJson, Config, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_mesh


def export(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Checkpoint to export: <run>/checkpoints/<step> or best, or a run directory for its newest "
            "checkpoint. Without --config, the settings of that run are used. Without --checkpoint, the untrained "
            "model of --config or --set model.path is exported.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder to create; must not exist yet. Required.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Data type of the weights; checkpoints contain float32.")
    ] = "float32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Export only the adapters of a run with model.lora, in PEFT format.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Export the policy or its base model for Hugging Face.

    Adapters are merged into the model's weights, unless --adapter exports them alone.
    """
    base = config or find_run_settings({"--checkpoint": checkpoint})
    resolved = resolve(base, overrides, print_config=print_config, check=check_for_mesh)
    out = require_path(out, "--out")
    if checkpoint is None and (adapter or not (config or overrides)):
        way_out = "name a base model with --config or --set model.path"
        if adapter:
            way_out = "omit --adapter, since an untrained model has no adapters"
        raise InputError(f"missing option --checkpoint; give a run or one of its checkpoints, or {way_out}")
    require_inputs(resolved.settings, {"--checkpoint": checkpoint})
    if checkpoint is None:
        from app.commands.named_files import check_model_path

        check_model_path("model.path", resolved.settings.model.path)
    source = checkpoint or f"the untrained model of model.path = {resolved.settings.model.path}"
    show_progress(f"grpo export: {source}; loading JAX")
    from app.export import huggingface

    summary = huggingface.export(resolved, checkpoint=checkpoint, out=out, dtype=dtype, only_adapters=adapter)
    print_result(summary, as_json=as_json)
