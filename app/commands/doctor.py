"""`grpo doctor`."""

from __future__ import annotations

import sys

import typer

from app.commands.command_support import format_json, handle_errors, resolve, write
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings.checks.commands import check_for_mesh


def doctor(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look at all that a run of these settings needs, before a long one. Fetches nothing and leaves nothing behind."""
    with handle_errors(debug):
        # What else is amiss with the settings is one of the findings.
        resolved = resolve(config, overrides, print_config=print_config, check=check_for_mesh)
        from app.preflight.doctor import run_doctor

        found = run_doctor(resolved)
        if found.host == 0:
            write(format_json(found.to_dict()) if as_json else found.to_text(), sys.stdout)
    if found.exit_code:
        write(f"error: {', '.join(found.failed_checks)}: a run of these settings would fail", sys.stderr)
    raise typer.Exit(found.exit_code)
