"""`grpo inspect-mesh`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import format_json, handle_errors, resolve, write
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_inspect_mesh, check_for_mesh


def inspect_mesh(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    plan: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Show instead how the samples of a file would be cut and packed."),
    ] = None,
    role: Annotated[
        Literal["update", "policy", "reference", "critic"] | None,
        typer.Option(help="Whose micro-batches --plan shows.  [default: update]", show_default=False),
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.png|.svg", help="Draw the rows that --plan shows to a file.")
    ] = None,
    compiles: Annotated[
        bool,
        typer.Option(
            "--compile", help="Also compile each phase's programs, and read from them what they need. Takes minutes."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show the devices, the mesh over them, where weights and batches lie, and what fits. Loads no weights."""
    with handle_errors(debug):
        check = check_for_inspect_mesh if plan is None else check_for_mesh
        resolved = resolve(config, overrides, print_config=print_config, check=check)
        for option, given in (("--picture", picture), ("--role", role)):
            if given is not None and plan is None:
                raise InputError(f"{option} goes with --plan FILE.jsonl")
        if compiles and plan is not None:
            raise InputError("--compile goes without --plan, which needs no programs")
        if plan is None:
            from app.preflight.inspect_mesh import inspect_mesh as look_at

            report = look_at(resolved, compiles=compiles)
        else:
            from app.preflight.packing_report import inspect_plan

            report = inspect_plan(resolved, file=plan, role=role or "update", plot_path=picture)
        write(format_json(report.to_dict()) if as_json else report.to_text(), sys.stdout)
