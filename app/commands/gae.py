"""The command `grpo gae`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from app.commands.command_support import (
    print_result,
    refuse_existing,
    require_inputs,
    require_path,
    resolve,
    show_progress,
)
from app.commands.options import AsJson, Config, Overrides, Overwrite, PrintConfig
from settings import InputError, Resolved
from settings.checks.commands import check_for_mesh

DEFAULT_BENCH_SHAPES = "16x8192,128x65536"
DEFAULT_BENCH_FOLDER = Path("gae-bench")


def gae(
    config: Config = None,
    overrides: Overrides = None,
    print_config: PrintConfig = False,
    source: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="FILE.jsonl|FILE.npz",
            help="Samples with values, or matrices. Required, except with --bench.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Output file in the format of --input; with --bench, a folder.")
    ] = None,
    gamma: Annotated[str | None, typer.Option(metavar="G", help="Discount factor; overrides algorithm.gamma.")] = None,
    lam: Annotated[str | None, typer.Option(metavar="L", help="Lambda of GAE; overrides algorithm.lam.")] = None,
    chunk_size: Annotated[
        str | None,
        typer.Option(metavar="C", help="Chunk size of --backend chunked; overrides algorithm.gae_chunk_size."),
    ] = None,
    backend: Annotated[
        Literal["auto", "chunked", "numpy"],
        typer.Option(help="chunked: a scan in JAX on the device; numpy: on the host. auto is numpy, as in training."),
    ] = "auto",
    mask_mode: Annotated[
        Literal["skip", "through", "zero"],
        typer.Option(
            help="How to treat tokens that the policy did not write: leave them out (skip, as in training), keep them "
            "as ordinary steps (through), or keep them with reward 0 and value 0 (zero)."
        ),
    ] = "skip",
    bench: Annotated[
        bool,
        typer.Option(
            "--bench", help="Benchmark every backend and chunk size on this machine, on --input or random data."
        ),
    ] = False,
    shapes: Annotated[
        str | None,
        typer.Option(
            metavar="BxT,...", help=f"Shapes of the random data for --bench.  [default: {DEFAULT_BENCH_SHAPES}]"
        ),
    ] = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
) -> None:
    """Add advantages and returns to samples or matrices.

    Samples get the advantages that training would compute with the same settings: algorithm.gamma, lam,
    length_adaptive_lam, bootstrap_truncated, whiten_advantages, critic.lam, and the KL penalty of algorithm.beta if it
    is in the reward. Matrices contain no logprobs, so they get no penalty. The estimator is always GAE;
    algorithm.estimator is ignored. Runs on one host.
    """
    names = {"--gamma": "gamma", "--lam": "lam", "--chunk-size": "gae_chunk_size"}
    texts = zip(names.items(), (gamma, lam, chunk_size), strict=True)
    given = {option: (f"algorithm.{name}", text) for (option, name), text in texts if text is not None}
    resolved = resolve(config, overrides, flags=given, print_config=print_config, check=check_for_mesh)
    for is_refused, reason in (
        (shapes and not bench, "--shapes is only used with --bench; add --bench or omit --shapes"),
        (shapes and source, "--shapes cannot be combined with --input, whose samples are timed; omit one of them"),
        (bench and backend != "auto", "--backend cannot be combined with --bench, which times every backend"),
    ):
        if is_refused:
            raise InputError(reason)
    require_inputs(resolved.settings, {"--input": source})
    if bench:
        folder = out or DEFAULT_BENCH_FOLDER
        refuse_existing({"--out": folder / "bench.json"}, overwrite=overwrite)
        _benchmark(resolved, source, folder, shapes=shapes, mask_mode=mask_mode, as_json=as_json)
    else:
        source, out = require_path(source, "--input"), require_path(out, "--out")
        refuse_existing({"--out": out}, overwrite=overwrite)
        show_progress(f"grpo gae: {source}; loading JAX")
        from app.stages import gae

        solver = "numpy" if backend == "auto" else backend
        summary = gae.estimate_advantages(resolved.settings, input=source, out=out, backend=solver, mask_mode=mask_mode)
        print_result(summary, as_json=as_json)


def _benchmark(
    resolved: Resolved, source: Path | None, folder: Path, *, shapes: str | None, mask_mode: str, as_json: bool
) -> None:
    show_progress("grpo gae --bench: loading JAX")
    from app.stages.gae_benchmark import format_report, run_benchmark

    shapes = shapes or DEFAULT_BENCH_SHAPES
    report = run_benchmark(resolved.settings, folder=folder, input=source, shapes=shapes, mask_mode=mask_mode)
    print_result(report, as_json=as_json, text=format_report(report))
