"""The command line: one Typer app over `app/commands`.

Each command imports its packages only when it runs, so `--help`, `--version`, `--print-config` and the checks of
settings do not need JAX.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from app.commands import doctor, evaluate, export, gae, inspect_mesh, report, rollout, score, train
from app.commands.command_support import write

app = typer.Typer(
    help="Trains language models with GRPO on a JAX mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
for command in (
    doctor.doctor,
    train.train,
    evaluate.evaluate,
    rollout.rollout,
    score.score,
    gae.gae,
    inspect_mesh.inspect_mesh,
    report.report,
    export.export,
):
    app.command()(command)


def _show_version(is_requested: bool) -> None:
    if is_requested:
        try:
            installed = version("grpo-jax")
        except PackageNotFoundError:
            installed = "(not installed)"
        write(f"grpo {installed}", sys.stdout)
        raise typer.Exit


@app.callback()
def _grpo(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None: ...


def main() -> None:
    """Runs the command line."""
    # Suppresses the tokenizer library's advice to install PyTorch, which this program does not use.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app(prog_name="grpo")


if __name__ == "__main__":
    main()
