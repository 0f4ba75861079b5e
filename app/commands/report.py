"""The command `grpo report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from app.commands.command_support import print_result
from app.commands.options import AsJson


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Run directory: <run.dir>/<run.name>.")],
    samples: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Maximum number of samples in rollouts.html.  [default: 400]", show_default=False
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the HTML report of a run from its other files."""
    from app.report.write_report import write_report

    summary = write_report(run) if samples is None else write_report(run, num_samples=samples)
    print_result(summary, as_json=as_json)
