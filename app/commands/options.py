"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    str | None,
    typer.Option(metavar="FILE|PRESET", help="YAML file or preset.  [default: quickstart]", show_default=False),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Checkpoint to use: <run>/checkpoints/<step> or best, or a run directory for its newest checkpoint. "
        "Without --config, the settings of that run are used.",
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Override one setting; the value is YAML. Repeatable."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved settings with the source of each, and exit.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
