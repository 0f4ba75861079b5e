"""Compares the GRPO steps of grpo and TRL with equal model, prompts, lengths and precision on one machine.

    python scripts/bench/train_step.py --model DIR --data train.jsonl --peer-python PYTHON [--beta 0.04]
        [--set a.b=c ...] [--peer-option OPTION ...] [--steps 2] [--warmup 2] [--rounds 2] [--out FILE.json]

DIR is a Hugging Face directory and PYTHON the interpreter of an environment with TRL; without PYTHON only grpo runs.
Each round starts a process of grpo and then a process of TRL, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ceilings
import jax
import workload

from app.model.io.model_files import open_model
from app.prompts.dataset import load_dataset
from app.prompts.encode import encode_prompts
from app.prompts.tokenizer import load_tokenizer
from settings.schema.data import DataSettings

HERE = Path(__file__).parent
OURS, PEER = "grpo", "TRL"


@dataclass
class Side:
    """The reports of all processes of grpo or of TRL."""

    steps: list[dict[str, float]] = field(default_factory=list)
    peak_memory_bytes: list[int] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def add(self, reported: dict[str, Any]) -> None:
        self.steps += reported.pop("steps")
        self.peak_memory_bytes.append(reported.pop("peak_memory_bytes"))
        self.facts = reported

    def seconds(self, phase: str) -> list[float]:
        return [step[phase] for step in self.steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="Hugging Face directory")
    parser.add_argument("--data", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--peer-python", help="interpreter with TRL")
    parser.add_argument("--set", action="append", default=[], dest="overrides", help="a setting of our side")
    parser.add_argument(
        "--peer-option", action="append", default=[], help="an option of step_of_trl.py, such as --checkpointing"
    )
    parser.add_argument("--beta", type=float, default=0.0, help="KL coefficient; above 0, a reference model is used")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of each process")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sides = run_in_turn(options)
    print(table(sides))
    measured = {}
    if jax.default_backend() == "cpu":  # the ceilings are measured in float32, in which both sides compute on a CPU
        measured["matmul_flops_per_s"] = ceilings.matmul_flops_per_s()
        measured["read_bytes_per_s"] = ceilings.read_bytes_per_s()
        print(against_ceilings(sides[OURS], measured))
    if options.out:
        options.out.write_text(json.dumps(record(options, sides, measured), indent=1) + "\n", encoding="utf-8")


def run_in_turn(options: argparse.Namespace) -> dict[str, Side]:
    overrides = [argument for override in options.overrides for argument in ("--set", override)]
    commands = {OURS: [sys.executable, str(HERE / "step_of_grpo.py"), *overrides]}
    if options.peer_python:
        commands[PEER] = [options.peer_python, str(HERE / "step_of_trl.py"), *options.peer_option]
    sides = {name: Side() for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        choose_rows(options, rows, workload.NUM_PROMPTS * (options.warmup + options.steps))
        work = ["--model", options.model, "--rows", str(rows), "--beta", str(options.beta)]
        work += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
        for number in range(1, options.rounds + 1):
            for name, command in commands.items():
                print(f"round {number}: {name}", file=sys.stderr, flush=True)
                sides[name].add(last_line([*command, *work]))
    return sides


def choose_rows(options: argparse.Namespace, out: Path, num_rows: int) -> None:
    """Writes to `out` the first rows whose prompts have `MIN_PROMPT_LENGTH` to `MAX_PROMPT_LENGTH` tokens."""
    some = load_dataset(str(options.data)).rows[: 10 * num_rows]
    tokenizer = load_tokenizer(open_model(options.model))
    prompts, _ = encode_prompts(some, tokenizer, DataSettings(max_prompt_length=workload.MAX_PROMPT_LENGTH))
    chosen = [p for p in prompts if len(p.token_ids) >= workload.MIN_PROMPT_LENGTH][:num_rows]
    if len(chosen) < num_rows:
        raise SystemExit(
            f"--data: expected at least {num_rows} prompts of {workload.MIN_PROMPT_LENGTH} to "
            f"{workload.MAX_PROMPT_LENGTH} tokens, got {len(chosen)}; give a larger file"
        )
    lines = [json.dumps({"question": p.source, "answer": p.answer}) for p in chosen]
    out.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def last_line(command: Sequence[str]) -> dict[str, Any]:
    """Runs a command and returns the JSON object in the last line of its output; earlier lines go to stderr."""
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    *progress, report = process.stdout.strip().splitlines()
    print(*progress, sep="\n", file=sys.stderr, flush=True)
    return json.loads(report)


def table(sides: Mapping[str, Side]) -> str:
    """Formats median (minimum..maximum) of each side, and the median of grpo divided by the median of TRL."""
    lines = [f"{'':<22}" + "".join(f"{name:>26}" for name in sides) + (f"{'ratio':>10}" if PEER in sides else "")]
    rows = [
        (f"{phase}, s", {name: side.seconds(phase) for name, side in sides.items()})
        for phase in (*workload.PHASES, "step")
    ]
    rows.append(
        ("peak memory, GiB", {name: [b / 2**30 for b in side.peak_memory_bytes] for name, side in sides.items()})
    )
    for title, values in rows:
        cells = [f"{statistics.median(v):.2f} ({min(v):.2f}..{max(v):.2f})" for v in values.values()]
        line = f"{title:<22}" + "".join(f"{cell:>26}" for cell in cells)
        if PEER in sides and statistics.median(values[PEER]) > 0.01:
            line += f"{statistics.median(values[OURS]) / statistics.median(values[PEER]):>9.2f}x"
        lines.append(line)
    return "\n".join(lines)


def against_ceilings(side: Side, measured: Mapping[str, float]) -> str:
    """Formats the time of each phase, and the shortest time that the measured limits of the machine allow."""
    flops_rate, read_rate = measured["matmul_flops_per_s"], measured["read_bytes_per_s"]
    parameters, samples = side.facts["num_parameters"], workload.NUM_PROMPTS * workload.GROUP_SIZE
    # Samples share their prompts in every pass.
    tokens = side.facts["prompt_tokens_per_step"] + samples * workload.NEW_TOKENS
    read = 4 * parameters * workload.NEW_TOKENS / read_rate
    computed = 2 * parameters * tokens / flops_rate
    floors = {"rollout": max(read, computed), "update": 6 * parameters * tokens / flops_rate}
    if side.facts["beta"] > 0:
        floors["score"] = 2 * parameters * tokens / flops_rate
    lines = [
        f"ceilings: {flops_rate / 1e9:.0f} GFLOP/s (float32 product), {read_rate / 1e9:.1f} GB/s (reading)",
        f"decoding reads the weights in {read:.1f} s and computes in {computed:.1f} s",
    ]
    for phase, floor in floors.items():
        seconds = statistics.median(side.seconds(phase))
        lines.append(f"{phase:<8} {seconds:6.2f} s, floor {floor:6.2f} s: {floor / seconds:.0%} of the ceiling")
    return "\n".join(lines)


def record(options: argparse.Namespace, sides: Mapping[str, Side], measured: Mapping[str, float]) -> dict[str, Any]:
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "beta": options.beta,
        "ceilings": dict(measured),
        "sides": {
            name: {
                "median_s": {phase: statistics.median(side.seconds(phase)) for phase in (*workload.PHASES, "step")},
                "steps": side.steps,
                "peak_memory_bytes": side.peak_memory_bytes,
                **side.facts,
            }
            for name, side in sides.items()
        },
    }


if __name__ == "__main__":
    main()
