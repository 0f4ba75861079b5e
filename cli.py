"""The command line: parse, load settings, open one room, print.

Rooms are imported inside the verbs, so that `--help`, `--version`, `--print-config` and every error
in the settings answer without starting JAX.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TextIO

import typer

from settings import InputError, Resolved, load
from settings.checks import (
    check_for_dry_run,
    check_for_inspection,
    check_for_mesh,
    check_for_rollout,
    check_for_score,
    check_for_simulation,
    check_for_train,
)
from settings.layers import NO_FLAGS, Flags

EXIT_FAILURE = 1
EXIT_INPUT = 2
EXIT_INTERRUPTED = 130
BENCH_SHAPES = "16x8192,128x65536"

app = typer.Typer(
    help="Trains language models with GRPO on a JAX mesh.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)

Config = Annotated[
    str | None,
    typer.Option(metavar="FILE|PRESET", help="YAML file or preset.  [default: quickstart]", show_default=False),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=c", help="Set one setting; the value is YAML. Repeatable."),
]
PrintConfig = Annotated[
    bool, typer.Option("--print-config", help="Print the resolved settings with what set each, and stop.")
]
Debug = Annotated[bool, typer.Option("--debug", help="Show a traceback with errors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        _write(f"grpo {_version()}", sys.stdout)
        raise typer.Exit


@app.callback()
def _grpo(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and stop.", callback=_show_version, is_eager=True),
    ] = False,
) -> None: ...


@app.command()
def train(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    resume: Annotated[
        Literal["auto", "never", "must"],
        typer.Option(
            help="Continue the run directory's newest checkpoint: if there is one (auto), "
            "refuse a used directory (never), refuse one without (must)."
        ),
    ] = "never",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check all that a launch does, print sizes and memory, and stop."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what --dry-run finds as JSON.")] = False,
    debug: Debug = False,
) -> None:
    """Train a model: rollout, reward, score, advantage, update, again and again."""
    with _errors_for_people(debug):
        if as_json and not dry_run:
            raise InputError("--json goes with --dry-run; a run's figures are in its metrics.jsonl")
        check = check_for_dry_run if dry_run else check_for_train
        resolved = _resolve(config, overrides, print_config=print_config, check=check)
        if dry_run:
            from app.training.dry_run import look_ahead

            found = look_ahead(resolved, resume=resume)
            if found is not None:
                _write(_as_json(found.to_dict()) if as_json else found.to_text(), sys.stdout)
            raise typer.Exit
        from app.training import run

        code = run.train(resolved, resume=resume)
    raise typer.Exit(code)


@app.command()
def rollout(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON Lines of prompts instead of data.source."),
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Take only the first prompts.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Where the samples go, required; what --simulate finds, as JSON."),
    ] = None,
    simulate: Annotated[
        Path | None,
        typer.Option(
            metavar="TRACE.jsonl",
            help="Sample nothing; compare all schedules on the lengths of a file: samples as --out has them, an event "
            "log, or lines of uid, prompt, index, length, prompt_length.",
        ),
    ] = None,
    cost: Annotated[
        Path | None,
        typer.Option(metavar="FILE.json", help="What decoding costs for --simulate.  [default: a 7B model on an H200]"),
    ] = None,
    timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.png|.svg|.html", help="Draw what every slot of rollout.scheduler or --simulate does."
        ),
    ] = None,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Keep the event log of rollout.scheduler, which --simulate reads."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Sample completions and write them as JSON Lines."""
    with _errors_for_people(debug):
        check = check_for_rollout if simulate is None else check_for_simulation
        resolved = _resolve(config, overrides, print_config=print_config, check=check)
        for option, given, wanted in (
            ("--cost", cost, True),
            *(("--prompts", prompts, False), ("--limit", limit, False), ("--log", log, False)),
        ):
            if given is not None and wanted != (simulate is not None):
                raise InputError(f"{option} goes {'with' if wanted else 'without'} --simulate")
        if simulate is not None:
            from app.training.simulate import simulate as compare_schedules

            found = compare_schedules(resolved, trace=simulate, cost=cost, out=out, timeline=timeline)
            _write(_as_json(found.to_dict()) if as_json else found.to_text(), sys.stdout)
            raise typer.Exit
        out = _required(out, "--out")
        from app.training import stages

        summary = stages.rollout(resolved, prompts=prompts, limit=limit, out=out, timeline=timeline, log=log)
        if summary is not None:
            _write(_as_text(summary, as_json=as_json), sys.stdout)


@app.command()
def score(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    samples: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE.jsonl", help="Samples to score. Required."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE.jsonl", help="Where the scored samples go. Required.")
    ] = None,
    role: Annotated[
        Literal["policy", "reference", "critic", "reward"],
        typer.Option(help="Whose logprobs to add; `critic` adds values, `reward` runs reward.functions."),
    ] = "policy",
    check_packing: Annotated[
        bool,
        typer.Option(
            "--check-packing", help="First see whether samples score in a shared row as they do alone; exit 1 if not."
        ),
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Add logprobs, values or rewards to the samples of a file."""
    with _errors_for_people(debug):
        resolved = _resolve(config, overrides, print_config=print_config, check=check_for_score)
        samples, out = _required(samples, "--input"), _required(out, "--out")
        from app.training import score_file

        summary = score_file.score(resolved, input=samples, out=out, role=role, checks_packing=check_packing)
        if summary is not None:
            _write(_as_text(summary, as_json=as_json), sys.stdout)


@app.command()
def gae(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    source: Annotated[
        Path | None,
        typer.Option("--input", metavar="FILE.jsonl|FILE.npz", help="Samples with values, or matrices. Required."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Where the same goes with advantages and returns; the folder of --bench."),
    ] = None,
    gamma: Annotated[str | None, typer.Option(metavar="G", help="Overrides algorithm.gamma.")] = None,
    lam: Annotated[str | None, typer.Option(metavar="L", help="Overrides algorithm.lam.")] = None,
    chunk_size: Annotated[str | None, typer.Option(metavar="C", help="Overrides algorithm.gae_chunk_size.")] = None,
    backend: Annotated[
        Literal["auto", "serial", "chunked", "fused"] | None, typer.Option(help="Overrides algorithm.gae_backend.")
    ] = None,
    mask_mode: Annotated[
        Literal["skip", "through", "zero"] | None, typer.Option(help="Overrides algorithm.mask_mode.")
    ] = None,
    bench: Annotated[
        bool, typer.Option("--bench", help="Measure instead every backend and chunk size on this machine.")
    ] = False,
    shapes: Annotated[
        str | None,
        typer.Option(metavar="BxT,...", help=f"Shapes that --bench measures.  [default: {BENCH_SHAPES}]"),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Add advantages and returns (generalized advantage estimation) to samples or matrices; needs no model.

    Samples get what training under the same settings would give them: algorithm.gamma, lam, length_adaptive_lam,
    mask_mode, bootstrap_truncated, whiten_advantages, critic.lam, and the KL penalty of algorithm.beta where it is in
    the reward. What cannot be applied is named at the end.
    """
    with _errors_for_people(debug):
        flags = {
            "--gamma": ("algorithm.gamma", gamma),
            "--lam": ("algorithm.lam", lam),
            "--chunk-size": ("algorithm.gae_chunk_size", chunk_size),
            "--backend": ("algorithm.gae_backend", backend),
            "--mask-mode": ("algorithm.mask_mode", mask_mode),
        }
        given = {option: (field, text) for option, (field, text) in flags.items() if text is not None}
        resolved = _resolve(config, overrides, flags=given, print_config=print_config, check=check_for_mesh)
        if shapes is not None and not bench:
            raise InputError("--shapes goes with --bench")
        for option, value in (("--input", source), ("--backend", backend)):
            if value is not None and bench:
                raise InputError(f"{option} goes without --bench, which measures every backend on numbers of its own")
        if bench:
            from app.training import gae_bench

            measured = gae_bench.bench(resolved, shapes=shapes or BENCH_SHAPES, out=out)
            _write(_as_json(measured.to_dict()) if as_json else measured.to_text(), sys.stdout)
        else:
            source, out = _required(source, "--input"), _required(out, "--out")
            from app.training import gae_file

            summary = gae_file.estimate(resolved, input=source, out=out)
            _write(_as_text(summary, as_json=as_json), sys.stdout)


@app.command()
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
    with _errors_for_people(debug):
        check = check_for_inspection if plan is None else check_for_mesh
        resolved = _resolve(config, overrides, print_config=print_config, check=check)
        for option, given in (("--picture", picture), ("--role", role)):
            if given is not None and plan is None:
                raise InputError(f"{option} goes with --plan FILE.jsonl")
        if compiles and plan is not None:
            raise InputError("--compile goes without --plan, which needs no programs")
        if plan is None:
            from app.training.inspect_mesh import inspect_mesh as look_at

            report = look_at(resolved, compiles=compiles)
        else:
            from app.training.inspect_plan import inspect_plan

            report = inspect_plan(resolved, file=plan, role=role or "update", picture=picture)
        _write(_as_json(report.to_dict()) if as_json else report.to_text(), sys.stdout)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The directory of a run: <run.dir>/<run.name>.")],
    samples: Annotated[
        int | None, typer.Option(min=1, help="Samples in rollouts.html.  [default: 400]", show_default=False)
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write report.html, rollouts.html and plots/ of a run anew, from its files alone."""
    with _errors_for_people(debug):
        from app.report.write import write_report

        summary = write_report(run) if samples is None else write_report(run, num_samples=samples)
        _write(_as_text(summary, as_json=as_json), sys.stdout)


def main() -> None:
    """Entry point of the console script."""
    # The tokenizer's library advises to install PyTorch, which this program has no use for.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    app(prog_name="grpo")


def _resolve(
    config: str | None,
    overrides: list[str] | None,
    *,
    print_config: bool,
    check: Callable[[Resolved], None],
    flags: Flags = NO_FLAGS,
) -> Resolved:
    """Checked settings, with secrets in place; stops after printing them when that is all that was asked."""
    resolved = load(config, overrides or [], os.environ, flags)
    _tell(resolved.notices)
    if print_config:
        _write(resolved.to_yaml(), sys.stdout)
        raise typer.Exit
    check(resolved)
    from settings.secrets import load_secrets

    _tell(load_secrets(Path.cwd()))
    return resolved


def _required(path: Path | None, option: str) -> Path:
    """An option that only `--print-config` can do without."""
    if path is None:
        raise InputError(f"missing option {option}")
    return path


@contextmanager
def _errors_for_people(debug: bool) -> Iterator[None]:
    """Turns exceptions into a message on stderr and the exit code of its kind."""
    try:
        yield
    except KeyboardInterrupt:
        _fail("interrupted", EXIT_INTERRUPTED, debug=debug)
    except InputError as error:
        _fail(f"error: {error}", EXIT_INPUT, debug=debug)
    except typer.Exit:
        raise
    except Exception as error:
        hint = "" if debug else " (--debug shows the traceback)"
        _fail(f"error: {type(error).__name__}: {error}{hint}", EXIT_FAILURE, debug=debug)


def _fail(message: str, code: int, *, debug: bool) -> NoReturn:
    from settings.secrets import redacted

    _write(redacted(f"{traceback.format_exc()}{message}" if debug else message), sys.stderr)
    raise typer.Exit(code)


def _tell(notices: Sequence[str]) -> None:
    for notice in notices:
        _write(f"note: {notice}", sys.stderr)


def _write(text: str, stream: TextIO) -> None:
    """Writes lines; a reader that has seen enough (`| head`) is no error."""
    try:
        print(text.rstrip("\n"), file=stream, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _as_text(summary: dict[str, Any], *, as_json: bool) -> str:
    if as_json:
        return _as_json(summary)
    width = max(map(len, summary), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in summary.items())


def _as_json(result: Any) -> str:
    return json.dumps(result, indent=2, ensure_ascii=False)


def _version() -> str:
    try:
        return version("grpo")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    main()
