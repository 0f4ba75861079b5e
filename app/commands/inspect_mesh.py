"""The command `grpo inspect-mesh`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.command_support import print_result, resolve, show_progress
from app.commands.options import AsJson, Compiles, Config, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_inspect_mesh


def inspect_mesh(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    compiles: Compiles = False,
    hlo: Annotated[
        Path | None,
        typer.Option(
            "--hlo", metavar="DIR", help="With --compile: write the HLO text of each compiled program to DIR."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show how a model is sharded and what memory it needs."""
    if hlo is not None and not compiles:
        raise InputError("--hlo writes compiled programs; add --compile, or omit --hlo")
    resolved = resolve(config, overrides, print_config=print_config, check=check_for_inspect_mesh)
    show_progress(f"grpo inspect-mesh: model {resolved.settings.model.path}; loading JAX")
    from app.preflight import inspect_mesh

    print_result(inspect_mesh.inspect_mesh(resolved, compiles=compiles, hlo=hlo), as_json=as_json)
