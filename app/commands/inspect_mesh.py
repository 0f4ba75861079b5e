"""`grpo inspect-mesh`."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from app.commands.command_support import format_json, handle_errors, resolve, write
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings.checks.commands import check_for_inspect_mesh


def inspect_mesh(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile", help="Also compile the programs of each phase and show the memory they need. Takes minutes."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the devices, the mesh, the placement of weights and batches, and what fits. Loads no weights."""
    with handle_errors(debug):
        resolved = resolve(config, overrides, print_config=print_config, check=check_for_inspect_mesh)
        from app.preflight import inspect_mesh

        report = inspect_mesh.inspect_mesh(resolved, compiles=compiles)
        write(format_json(report.to_dict()) if as_json else report.to_text(), sys.stdout)
