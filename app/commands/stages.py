"""The verbs that write or extend files of samples: `grpo rollout`, `score` and `gae`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import as_text, errors_for_people, json_text, required, resolve, tell, write
from app.commands.options import AsJson, Config, Debug, Overrides, PrintConfig
from settings import InputError
from settings.checks.commands import check_for_mesh, check_for_rollout, check_for_score, check_for_simulation
from settings.checks.unused_settings import adapters_left_out

BENCH_SHAPES = "16x8192,128x65536"


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
    with errors_for_people(debug):
        check = check_for_rollout if simulate is None else check_for_simulation
        resolved = resolve(config, overrides, print_config=print_config, check=check)
        for option, given, wanted in (
            ("--cost", cost, True),
            *(("--prompts", prompts, False), ("--limit", limit, False), ("--log", log, False)),
        ):
            if given is not None and wanted != (simulate is not None):
                raise InputError(f"{option} goes {'with' if wanted else 'without'} --simulate")
        if simulate is not None:
            from app.stages.simulate import simulate as compare_schedules

            found = compare_schedules(resolved, trace=simulate, cost=cost, out=out, timeline=timeline)
            write(json_text(found.to_dict()) if as_json else found.to_text(), sys.stdout)
            raise typer.Exit
        out = required(out, "--out")
        tell(adapters_left_out(resolved))
        from app.stages import rollout

        summary = rollout.rollout(resolved, prompts=prompts, limit=limit, out=out, timeline=timeline, log=log)
        if summary is not None:
            write(as_text(summary, as_json=as_json), sys.stdout)


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
    with errors_for_people(debug):
        resolved = resolve(config, overrides, print_config=print_config, check=check_for_score)
        samples, out = required(samples, "--input"), required(out, "--out")
        if role == "policy":
            tell(adapters_left_out(resolved))
        from app.stages import score

        summary = score.score(resolved, input=samples, out=out, role=role, checks_packing=check_packing)
        if summary is not None:
            write(as_text(summary, as_json=as_json), sys.stdout)


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
    with errors_for_people(debug):
        flags = {
            "--gamma": ("algorithm.gamma", gamma),
            "--lam": ("algorithm.lam", lam),
            "--chunk-size": ("algorithm.gae_chunk_size", chunk_size),
            "--backend": ("algorithm.gae_backend", backend),
            "--mask-mode": ("algorithm.mask_mode", mask_mode),
        }
        given = {option: (field, text) for option, (field, text) in flags.items() if text is not None}
        resolved = resolve(config, overrides, flags=given, print_config=print_config, check=check_for_mesh)
        if shapes is not None and not bench:
            raise InputError("--shapes goes with --bench")
        for option, value in (("--input", source), ("--backend", backend)):
            if value is not None and bench:
                raise InputError(f"{option} goes without --bench, which measures every backend on numbers of its own")
        if bench:
            from app.stages import gae_benchmark

            measured = gae_benchmark.bench(resolved, shapes=shapes or BENCH_SHAPES, out=out)
            write(json_text(measured.to_dict()) if as_json else measured.to_text(), sys.stdout)
        else:
            source, out = required(source, "--input"), required(out, "--out")
            from app.stages import gae

            summary = gae.estimate(resolved, input=source, out=out)
            write(as_text(summary, as_json=as_json), sys.stdout)
