"""The command `grpo doctor`."""

from __future__ import annotations

import sys
from contextlib import suppress

import typer

from app.commands.addresses import name_run
from app.commands.command_support import print_result, resolve, show_progress, write
from app.commands.options import AsJson, Config, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_mesh


def doctor(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
) -> None:
    """Check everything that a run needs, without downloads."""
    # The report includes all other checks of the settings.
    resolved = resolve(config, overrides, print_config=print_config, check=check_for_mesh)
    with suppress(InputError):  # The report's bucket check explains why the bucket cannot be read.
        resolved = name_run(resolved, "never")
    show_progress(f"grpo doctor: {resolved.settings.run.name}, model {resolved.settings.model.path}; loading JAX")
    from app.preflight.doctor import run_doctor

    report = run_doctor(resolved)
    if report.host == 0:
        print_result(report, as_json=as_json)
    if report.exit_code:
        write(f"error: {', '.join(report.failed_checks)}: a run with these settings would fail", sys.stderr)
    raise typer.Exit(report.exit_code)
