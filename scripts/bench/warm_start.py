"""Compares the first steps of a run with and without compiled programs in the cache on disk.

    python scripts/bench/warm_start.py [--config quickstart] [--set NAME=VALUE ...]

The script starts the same run of two steps twice; the compilation cache is empty before the first start.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from compiled_presets import GRPO

from app.records.text_format import format_table

NAMES = ("first", "second")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="quickstart")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (cold, _), (warm, after) = (steps(Path(folder), name, options.config, options.set) for name in NAMES)
    rows = [
        (
            *(name, *(f"{step[key]:.1f} s" for key in ("time/step_s", "time/rollout_s", "time/update_s"))),
            str(step["perf/compilations"]),
        )
        for name, step in (("the first start's", cold), ("the second start's", warm), ("its second step", after))
    ]
    print(format_table(rows, header=("first step", "seconds", "rollout", "update", "compiled")))
    print(f"The second start's first step takes {warm['time/step_s'] / cold['time/step_s']:.2f}x the first start's.")


def steps(folder: Path, name: str, config: str, overrides: list[str]) -> list[dict[str, Any]]:
    """Runs two training steps in a new process, and returns their metrics."""
    settings = [f"run.dir={folder}", f"run.name={name}", "run.steps=2", *overrides]
    sets = [word for one in settings for word in ("--set", one)]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"XDG_CACHE_HOME": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "true"}
    command = [sys.executable, "-c", GRPO, "train", "--config", config, *sets]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["step"] > 0]


if __name__ == "__main__":
    main()
