"""The verbs that only look: `grpo inspect-mesh` and `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import as_text, errors_for_people, json_text, resolve, write
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_inspection, check_for_mesh


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
    with errors_for_people(debug):
        check = check_for_inspection if plan is None else check_for_mesh
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

            report = inspect_plan(resolved, file=plan, role=role or "update", picture=picture)
        write(json_text(report.to_dict()) if as_json else report.to_text(), sys.stdout)


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run: <run.dir>/<run.name>.")],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples in rollouts.html.  [default: 400]", show_default=False)
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write report.html, rollouts.html and plots/ of a run anew, from its files alone."""
    with errors_for_people(debug):
        from app.report.write_report import write_report

        summary = write_report(run) if samples is None else write_report(run, num_samples=samples)
        write(as_text(summary, as_json=as_json), sys.stdout)
