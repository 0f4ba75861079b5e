"""The command line: one Typer app over `app/commands`.

Each command imports its packages only when it runs, so `--help`, `--version`, `--print-config` and the checks of
settings do not need JAX.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from inspect import Parameter, signature
from typing import Annotated, Any, cast

import typer
from typer.core import TyperCommand
from typer.models import ArgumentInfo

from app.commands import doctor, evaluate, export, gae, inspect_mesh, presets, report, rollout, score, settings, train
from app.commands.addresses import local_inputs
from app.commands.command_support import handle_errors, write
from app.records.versions import version_of
from settings.loading.config_file import is_config
from settings.loading.fields import FIELDS, suggest_fields


class _Command(TyperCommand):
    """A command that groups the options in its help, and suggests `--set` if a setting is given as an option.

    A single-value option given twice is an error, except during shell completion.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if ctx.resilient_parsing:
            return super().parse_args(ctx, args)
        known: dict[str, Any] = {option: parameter for parameter in self.get_params(ctx) for option in parameter.opts}
        for name in (argument.partition("=")[0] for argument in args if argument.startswith("--")):
            if name not in known and len(name) > 2:
                if name == "--preset" and "--config" in known:
                    ctx.fail("No such option: --preset. Presets and files of settings are given as --config NAME")
                near, text = suggest_fields(name.removeprefix("--"))
                if near or "no counterpart" in text:
                    ctx.fail(f"No such option: {name}. Settings are given as --set NAME=VALUE{text}")
        if args and (last := known.get(args[-1])) and args[-1].startswith("-") and not last.is_flag:
            ctx.fail(f"{args[-1]} needs a value: {last.get_help_record(ctx)[0]}")
        extra, given = cast("Any", self.make_parser(ctx).parse_args([*args])[1:])
        if "--set" in known and (names := [word.partition("=")[0].lstrip("+") for word in extra if "=" in word]):
            hints = "".join(suggest_fields(name)[1] for name in names if name not in FIELDS)
            ctx.fail(f"Unexpected arguments: {' '.join(extra)}. Settings are given as --set NAME=VALUE{hints}")
        if "--config" in known and (files := [word for word in extra if is_config(word)]):
            ctx.fail(f"Unexpected argument: {files[0]}. Presets and files of settings are given as --config {files[0]}")
        for parameter in given:
            if given.count(parameter) > 1 and not (parameter.multiple or parameter.is_flag):
                ctx.fail(f"{parameter.opts[0]} is given {given.count(parameter)} times, but takes one value")
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            if record := parameter.get_help_record(ctx):
                kind = f"{parameter.param_type_name}s".capitalize()
                panels.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(record)
        for panel, records in sorted(panels.items(), key=lambda item: item[0] == "Options"):  # they come last
            with formatter.section(panel):
                formatter.write_dl(records)


app = typer.Typer(
    help="Trains language models with reinforcement learning (GRPO, PPO and related algorithms) on a JAX mesh.",
    epilog="Example: grpo train --config dapo --set run.steps=20",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)
COMMANDS = {
    train.train: "grpo train --config dapo --set run.seed=1",
    evaluate.evaluate: "grpo evaluate --checkpoint runs/quickstart-seed0 --out after.jsonl",
    export.export: "grpo export --checkpoint runs/quickstart-seed0 --out my-model",
    report.report: "grpo report runs/quickstart-seed0",
    rollout.rollout: "grpo rollout --limit 8 --out samples.jsonl",
    score.score: "grpo score --role reward --input samples.jsonl --out scored.jsonl",
    gae.gae: "grpo gae --lam 0.95 --input valued.jsonl --out advantages.jsonl",
    doctor.doctor: "grpo doctor --config smollm2_gsm8k",
    inspect_mesh.inspect_mesh: "grpo inspect-mesh --set mesh.pretend=v5e-8",
    settings.settings: "grpo settings rollout",
    presets.presets: "grpo presets dapo",
}
"""Maps the function of each command to the example at the end of its help."""


def _with_errors_handled(command: Callable[..., None]) -> Callable[..., None]:
    """Adds `--debug` to a command and turns its errors into a message and an exit code.

    Bucket addresses in its options become local paths.
    """
    without = signature(command, eval_str=True)

    @functools.wraps(command)
    def run(*, debug: bool, **arguments: Any) -> None:
        names = {_option_of(without.parameters[name]): name for name in arguments}
        options = {option: arguments[name] for option, name in names.items()}
        with handle_errors(debug), local_inputs(command.__name__, options) as local:
            command(**{name: local[option] for option, name in names.items()})

    option = typer.Option("--debug", help="Show a traceback with errors.")
    debug = Parameter("debug", Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, option])
    setattr(run, "__signature__", without.replace(parameters=[*without.parameters.values(), debug]))  # noqa: B010
    return run


def _option_of(parameter: Parameter) -> str:
    info = parameter.annotation.__metadata__[0]
    if isinstance(info, ArgumentInfo):
        return info.metavar or parameter.name
    # typer reads a default in the annotation as the option's name.
    return info.default if isinstance(info.default, str) else f"--{parameter.name.replace('_', '-')}"


for command, example in COMMANDS.items():
    app.command(cls=_Command, epilog=f"Example: {example}")(_with_errors_handled(command))


def _show_version(is_requested: bool) -> None:
    if is_requested:
        with handle_errors(debug=False):
            write(f"grpo {version_of('grpo-jax')}", sys.stdout)
        raise typer.Exit


@app.callback()
def _grpo(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None: ...


def main() -> None:
    """Runs the command line."""
    app(prog_name="grpo")


if __name__ == "__main__":
    main()
