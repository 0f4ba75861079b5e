"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Config = Annotated[
    str | None,
    typer.Option(metavar="FILE|PRESET", help="YAML file or preset.  [default: quickstart]", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override one setting; the value is YAML. Repeatable."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved settings with the source of each, and exit.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
