"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from settings.loading.config_file import preset_names
from settings.loading.fields import FIELDS

Config = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|PRESET",
        help="YAML file, or one of `grpo presets`.  [default: quickstart if the model is built in, else none]",
        show_default=False,
        autocompletion=preset_names,
        rich_help_panel="Settings",
    ),
]
CHECKPOINT_HELP = (
    "Checkpoint to use: <run>/checkpoints/<step> or best, or a run directory for its newest checkpoint; <run> may be "
    "an address in a bucket. "
    "Without --config, the settings of that run are used."
)
Checkpoint = Annotated[Path | None, typer.Option(metavar="DIR", help=CHECKPOINT_HELP)]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="a.b=c",
        help="Override a setting (see `grpo settings`); the value is YAML. Repeatable.",
        autocompletion=lambda: [f"{name}=" for name in FIELDS],
        rich_help_panel="Settings",
    ),
]
PrintConfig = Annotated[
    bool,
    typer.Option(
        "--print-config",
        help="Print the resolved settings and where each comes from, and exit.",
        rich_help_panel="Settings",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace output files that exist.")]
Compiles = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Also compile the programs of each phase to measure their memory. Takes minutes.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
