"""Compares seconds, compilations and peak memory of scoring a file with every kind of micro-batch.

    python scripts/bench/scoring.py --samples FILE.jsonl [--config smollm2_gsm8k] [--limit 64] [--rows 4 16]
        [--rounds 1] [--out FILE.json]

The script runs `grpo score` in a new process for each case: all samples in one pass (`off`, the baseline); a loop or a
scan over micro-batches of `--rows` rows padded to the longest sample; and packed rows with a quota of as many tokens.
Ratios are between seconds without compilation. Each round runs the cases in a different order.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

FIGURES = ("seconds", "tokens/s", "compiling seconds", "compilations", "micro-batches", "fill", "peak memory MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--samples", type=Path, required=True, help="samples with token ids, such as the output of `grpo rollout`"
    )
    parser.add_argument("--config", default="smollm2_gsm8k")
    parser.add_argument("--limit", type=int, default=64, help="samples")
    parser.add_argument("--rows", type=int, nargs="+", default=[4, 16], help="rows of a fixed micro-batch")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    lines = options.samples.read_text(encoding="utf-8").splitlines()[: options.limit]
    lengths = [len(r["prompt_token_ids"]) + len(r["completion_token_ids"]) for r in map(json.loads, lines)]
    cases = make_cases(options.rows, max(lengths))
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in cases}
    with tempfile.TemporaryDirectory() as folder:
        samples = Path(folder) / "samples.jsonl"
        samples.write_text("\n".join(lines) + "\n", encoding="utf-8")
        for number in range(options.rounds):
            for name in random.Random(number).sample([*cases], len(cases)):
                found[name].append(score(options.config, samples, cases[name]))
                print(f"{name}: {found[name][-1]['seconds']} s", file=sys.stderr, flush=True)
    medians = {
        name: {figure: statistics.median(run[figure] for run in runs) for figure in FIGURES}
        for name, runs in found.items()
    }
    print(f"{len(lines)} samples, {sum(lengths):,} tokens, the longest {max(lengths)}; medians of {options.rounds}")
    print(f"{'':<18}{'of off':>8}" + "".join(f"{name:>18}" for name in FIGURES))
    for name, figures in medians.items():
        ratio = figures["seconds"] / medians["off"]["seconds"]
        print(f"{name:<18}{ratio:>7.2f}x" + "".join(f"{figures[figure]:>18,.2f}" for figure in FIGURES))
    if options.out:
        record = {
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "config": options.config,
            "samples": len(lines),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "rounds": options.rounds,
            "cases": medians,
        }
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def make_cases(rows: list[int], longest: int) -> dict[str, tuple[str, ...]]:
    """Maps the name of each case to its settings below `score`."""
    fixed = {
        f"{strategy}, {count} rows": (f"strategy={strategy}", f"rows_per_device={count}")
        for strategy in ("loop", "scan")
        for count in rows
    }
    packed = {
        f"packed, {count * longest} tokens": (f"max_tokens_per_device={count * longest}", "dynamic=true")
        for count in rows
    }
    return {"off": ("strategy=off",), **fixed, **packed}


def score(config: str, samples: Path, chosen: tuple[str, ...]) -> dict[str, Any]:
    """Runs `grpo score` in a new process and returns its summary."""
    settings = [part for one in chosen for part in ("--set", f"score.{one}")]
    command = [sys.executable, "-m", "cli", "score", "--config", config, *settings, "--json"]
    paths = ["--input", str(samples), "--out", str(samples.with_name("scored.jsonl")), "--overwrite"]
    return json.loads(subprocess.run([*command, *paths], check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
