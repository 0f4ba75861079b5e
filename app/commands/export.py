"""`grpo export`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import (
    find_run_config,
    format_summary,
    handle_errors,
    require_path,
    resolve,
    show_progress,
    write,
)
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings.checks.commands import check_for_mesh


def export(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="<run>/checkpoints/<step> or best, or a run's folder for its newest. Its run's settings apply unless "
            "--config names others. Required.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The folder to make; nothing may have its name. Required.")
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16"], typer.Option(help="Type of the weights; float32 is what the checkpoint holds.")
    ] = "float32",
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Of a run with model.lora, its adapters alone, in PEFT's format.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the policy of a checkpoint as a Hugging Face directory, with a model card.

    Adapters are merged into the model's weights, unless --adapter asks for them alone.
    """
    with handle_errors(debug):
        config = config or find_run_config({"--checkpoint": checkpoint})
        resolved = resolve(config, overrides, print_config=print_config, check=check_for_mesh)
        checkpoint, out = require_path(checkpoint, "--checkpoint"), require_path(out, "--out")
        show_progress(f"grpo export: {checkpoint}; loading JAX")
        from app.export import huggingface

        write_out = huggingface.export_adapter if adapter else huggingface.export
        summary = write_out(resolved, checkpoint=checkpoint, out=out, dtype=dtype)
        write(format_summary(summary, as_json=as_json), sys.stdout)
