"""Compares the gradient programs of grpo and Tunix on one TPU slice: estimated time and HBM per completion token.

    python scripts/bench/tpu_compile.py [--tunix-python PYTHON] [--only NAME ...] [--keep DIRECTORY] [--out FILE.json]

Nothing is run or downloaded: libtpu (`pip install -e '.[tpu]'`, on any x86-64 Linux) compiles for TPUs without a
device. PYTHON is the interpreter of an environment with google-tunix and libtpu; without it only grpo is compiled.
Compiling a program takes minutes; programs in the folder `--keep` are not compiled again.

The work consists of 32 samples of 512 prompt and 512 completion tokens, 8 samples per prompt. Both sides have float32
weights over fsdp and compute in bfloat16 without a reference model. grpo has the settings of the preset; a second line
shows the fullest micro-batch of the preset's own step. Tunix has its defaults and BLOCK remat, with all 32 samples at
once; `splash` is its flash attention.

Both times are estimated by `scripts.bench.program_time`: the compiler's cycles, and for a Pallas kernel the instruction
bundles of its schedule times its grid steps, or the time of its copies if that is longer.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shapes import QWEN2_5

from app.mesh.chips import parse_slice
from app.records.text_format import format_bytes, format_table
from scripts.bench.kernel_time import SCHEDULES, take_scheduled_bundles
from scripts.bench.program_time import program_time

HERE = Path(__file__).resolve().parent
PRESETS = {"Qwen2.5-1.5B": ("gsm8k_qwen2_5_1_5b_v5e_8", "v5e-8"), "Qwen2.5-3B": ("gsm8k_qwen2_5_3b_v6e_8", "v6e-8")}
WORK = {"prompt": 512, "completion": 512, "group_size": 8}
OURS = "grpo"
ROWS = {OURS: 32, "grpo, fullest micro-batch": 128}
TUNIX = {"Tunix": False, "Tunix, splash": True}
"""Maps each configuration of Tunix to whether it uses flash attention."""


def programs(tunix_python: str | None) -> Iterator[tuple[str, str, list[str], dict[str, Any]]]:
    """Yields (model, side, command that compiles, arguments of the command) for each program."""
    for model, (preset, slice_name) in PRESETS.items():
        place = parse_slice(slice_name)
        work = {**WORK, "config": QWEN2_5[model]}
        for side, rows in ROWS.items():
            command = [sys.executable, str(HERE / "gradients_of_grpo.py")]
            yield model, side, command, {**work, "preset": preset, "slice": slice_name, "rows": rows}
        for side, flash in TUNIX.items() if tunix_python else ():
            command = [tunix_python or "", str(HERE / "gradients_of_tunix.py")]
            topology = {"topology_name": place.topology_name, **place.topology_options}
            yield model, side, command, {**work, "flash": flash, "topology": topology, "rows": ROWS[OURS]}


def compiled(command: list[str], work: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Compiles a program in a separate process, unless the directory contains its figures, and returns the figures."""
    figures, schedules = directory / "figures.json", directory / "schedules"
    if not figures.exists():
        schedules.mkdir(parents=True, exist_ok=True)
        options = f"--xla_jf_dump_to={schedules} --xla_jf_dump_llo_text=true"
        options += f" --xla_jf_dump_llo_pass_label_regex={SCHEDULES}"
        environment = {**os.environ, "LIBTPU_INIT_ARGS": options, "ALLOW_MULTIPLE_LIBTPU_LOAD": "true"}
        subprocess.run([*command, json.dumps(work), str(directory)], env=environment, check=True)
        found = json.loads(figures.read_text())
        figures.write_text(json.dumps({"bundles": take_scheduled_bundles(schedules), **found}))
    return json.loads(figures.read_text())


def estimated(model: str, side: str, figures: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the output line of a program: the time of each part, and time and HBM per completion token."""
    place = parse_slice(PRESETS[model][1])
    if "estimated_s" not in figures:
        text = (directory / "program.hlo").read_text()
        time = program_time(text, place.chip, bundles=figures["bundles"], turns={})
        figures = {**figures, "estimated_s": time.estimated_s, "parts_s": dict(time.parts)}
    rows = figures.get("rows", ROWS[OURS])
    tokens = rows * WORK["completion"] / place.num_chips
    return {
        **{"model": model, "slice": place.name, "side": side, "samples": rows},
        **{name: one for name, one in figures.items() if name.endswith(("_s", "_bytes")) or name == "versions"},
        "s_per_token": figures["estimated_s"] / tokens,
        "temporary_bytes_per_token": figures["temporary_bytes"] / tokens,
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Formats the output lines as a table; the last columns show the figures of `OURS` relative to each line."""
    rows = []
    for one in lines:
        seconds, size = one["s_per_token"], one["temporary_bytes_per_token"]
        row = [one["model"], one["slice"], one["side"], str(one["samples"]), f"{one['estimated_s'] * 1e3:.0f} ms"]
        row += [format_bytes(one["temporary_bytes"]), f"{seconds * 1e6:.0f} us", format_bytes(size), "", ""]
        ours = next((x for x in lines if (x["model"], x["side"]) == (one["model"], OURS)), None)
        if ours is not None and one["side"] not in ROWS:
            row[-2:] = f"{ours['s_per_token'] / seconds:.2f}x", f"{ours['temporary_bytes_per_token'] / size:.2f}x"
        rows.append(row)
    head = ("model", "slice", "side", "samples", "time", "temporaries", "a token", "a token", "ours: time", "HBM")
    return format_table(rows, header=head, num_left=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix-python", help="interpreter of an environment with google-tunix 0.1.7 and libtpu")
    parser.add_argument("--only", nargs="*", help="programs, such as 'Qwen2.5-1.5B grpo'; the record keeps the others")
    parser.add_argument("--keep", type=Path, help="folder for compiled programs")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tpu_compile.json")
    options = parser.parse_args()
    if options.tunix_python is None:
        print("Tunix is missing: --tunix-python PYTHON, with google-tunix==0.1.7 and libtpu", file=sys.stderr)
    lines = json.loads(options.out.read_text())["programs"] if options.only and options.out.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        for model, side, command, work in programs(options.tunix_python):
            name = f"{model} {side}"
            if options.only is None or name in options.only:
                directory = (options.keep or Path(folder)).resolve() / name.replace(", ", "-").replace(" ", "-")
                print(name, file=sys.stderr, flush=True)
                lines = [one for one in lines if (one["model"], one["side"]) != (model, side)]
                lines.append(estimated(model, side, compiled(command, work, directory), directory))
    print(table(lines))
    record = {"date": datetime.now(UTC).date().isoformat(), "programs": lines}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
