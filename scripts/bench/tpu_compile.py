"""Our gradients against Tunix's: estimated time and HBM for each completion token, compiled for the same TPU slice.

    python scripts/bench/tpu_compile.py [--tunix-python PYTHON] [--only TEXT ...] [--keep DIRECTORY] [--out FILE.json]

Nothing is run or downloaded: libtpu (`pip install -e '.[tpu]'`, on any x86-64 Linux) compiles for chips that are not
there. PYTHON is the interpreter of an environment with google-tunix and libtpu; without it only our side is compiled.
A program takes minutes; `--keep` holds compiled programs, and those already there are not compiled again.

The work is the longest samples that the settings allow: 32 of 512 prompt and 512 completion tokens, 8 of each prompt.
Both sides have float32 weights over fsdp and compute in bfloat16, without reference model. Ours has the settings of
the preset; a second line shows the fullest micro-batch of the preset's own step. Tunix has its defaults and BLOCK
remat, all 32 samples at once; `splash` is its flash attention, and `our options` gives it our compiler options, too.

Times are by the same accounting for both (`app.preflight.program_time`): the compiler's cycles, and for a Pallas kernel
the bundles of its schedule times the turns of its grid, or the bytes that it copies if that takes longer.
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

from app.mesh.compiler_options import COMPILER_OPTIONS
from app.mesh.tpu_chips import parse_slice
from app.preflight.hlo_text import HloProgram
from app.preflight.kernel_time import kernel_times, take_scheduled_bundles
from app.preflight.program_time import program_time

HERE = Path(__file__).resolve().parent
PRESETS = {
    "Qwen2.5-1.5B": ("gsm8k_qwen2_5_1_5b_v5e_8", "v5e-8"),
    "Qwen2.5-3B": ("gsm8k_qwen2_5_3b_v6e_8", "v6e-8"),
}
PROMPT = COMPLETION = 512
GROUP_SIZE = 8
OURS, OURS_FULL, TUNIX = "grpo", "grpo, fullest micro-batch", "Tunix"
ROWS = {OURS: 32, OURS_FULL: 128}
TUNIX_VARIANTS: Mapping[str, Mapping[str, Any]] = {
    TUNIX: {"flash": False, "compiler_options": {}},
    "Tunix, splash": {"flash": True, "compiler_options": {}},
    "Tunix, splash, our options": {"flash": True, "compiler_options": dict(COMPILER_OPTIONS["tpu"])},
}


def programs(tunix_python: str | None) -> Iterator[tuple[str, str, list[str], dict[str, Any]]]:
    """Yields (model, side, command, work) for each program."""
    for model, (preset, slice_name) in PRESETS.items():
        place = parse_slice(slice_name)
        topology = {"topology_name": place.topology_name, "chips_per_host_bounds": place.host_bounds}
        work = {"config": QWEN2_5[model], "prompt": PROMPT, "completion": COMPLETION, "group_size": GROUP_SIZE}
        for side, rows in ROWS.items():
            command = [sys.executable, str(HERE / "gradients_of_grpo.py")]
            yield model, side, command, {**work, "preset": preset, "slice": slice_name, "rows": rows}
        for side, variant in TUNIX_VARIANTS.items() if tunix_python else ():
            command = [tunix_python or "", str(HERE / "gradients_of_tunix.py")]
            options = {**topology, **place.topology_options}
            yield model, side, command, {**work, **variant, "topology": options, "rows": ROWS[OURS]}


def compiled(command: list[str], work: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Returns the figures of a program, compiled in a process of its own unless the directory has it."""
    figures = directory / "figures.json"
    schedules = directory / "schedules"
    if not figures.exists():
        schedules.mkdir(parents=True, exist_ok=True)
        options = f"--xla_jf_dump_to={schedules} --xla_jf_dump_llo_text=true"
        options += " --xla_jf_dump_llo_pass_label_regex=.*schedule-analysis_final_bundles.*"
        environment = {**os.environ, "LIBTPU_INIT_ARGS": options}
        subprocess.run([*command, json.dumps(work), str(directory)], env=environment, check=True)
    found = json.loads(figures.read_text())
    if "bundles" not in found:
        found["bundles"] = take_scheduled_bundles(schedules)
        figures.write_text(json.dumps(found))
    return found


def estimated(model: str, side: str, figures: Mapping[str, Any], hlo: str) -> dict[str, Any]:
    """Returns one line of the record: the program's time by part, and time and HBM for each completion token."""
    place = parse_slice(PRESETS[model][1])
    program, turns = HloProgram(hlo), figures.get("turns", {})
    kernels = dict(kernel_times(program, place.chip, figures["bundles"], turns))
    time = program_time(program, place.chip, kernel_s=kernels, loop_counts=turns)
    rows = figures.get("rows", ROWS[OURS])
    tokens = rows * COMPLETION / place.num_chips
    return {
        "model": model,
        "slice": place.name,
        "side": side,
        "samples": rows,
        "completion_tokens_per_device": tokens,
        "estimated_s": time.estimated_s,
        "parts_s": dict(time.parts),
        "collective_bytes": dict(time.collective_bytes),
        **{name: figures[name] for name in ("argument_bytes", "output_bytes", "temporary_bytes", "compile_s")},
        "s_per_token": time.estimated_s / tokens,
        "temporary_bytes_per_token": figures["temporary_bytes"] / tokens,
        **({"versions": figures["versions"]} if "versions" in figures else {}),
    }


def table(lines: list[dict[str, Any]]) -> str:
    """Formats the record; the last columns are the figures of `OURS` relative to those of each line."""
    head = f"{'by the compiler':<52}{'samples':>8}{'ms':>8}{'GiB':>6}{'us/token':>10}{'MiB/token':>11}"
    out = [f"{head}{'ours, time':>12}{'ours, HBM':>11}"]
    for one in lines:
        seconds, size = one["s_per_token"], one["temporary_bytes_per_token"]
        row = f"{one['model']} {one['slice']} {one['side']:<30}{one['samples']:>6}{one['estimated_s'] * 1e3:>8.0f}"
        row = f"{row:<66}{one['temporary_bytes'] / 2**30:>6.1f}{seconds * 1e6:>10.0f}{size / 2**20:>11.2f}"
        ours = next((x for x in lines if (x["model"], x["side"]) == (one["model"], OURS)), None)
        if ours is not None and one["side"] not in ROWS:
            row += f"{ours['s_per_token'] / seconds:>11.2f}x{ours['temporary_bytes_per_token'] / size:>10.2f}x"
        out.append(row)
    return "\n".join(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tunix-python", help="interpreter of an environment with google-tunix 0.1.7 and libtpu")
    parser.add_argument("--only", nargs="*", default=[""], help="part of the names of models or sides")
    parser.add_argument("--keep", type=Path, help="folder for compiled programs")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "tpu_compile.json")
    options = parser.parse_args()
    if options.tunix_python is None:
        print("Tunix is missing: --tunix-python PYTHON, with google-tunix==0.1.7 and libtpu", file=sys.stderr)
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        for model, side, command, work in programs(options.tunix_python):
            name = f"{model} {side}"
            if any(part in name for part in options.only):
                directory = (options.keep or Path(folder)) / name.replace(", ", "-").replace(" ", "-")
                print(name, file=sys.stderr, flush=True)
                figures = compiled(command, work, directory)
                lines.append(estimated(model, side, figures, (directory / "program.hlo").read_text()))
    print(table(lines))
    record = {"date": datetime.now(UTC).date().isoformat(), "estimated_by": "libtpu", "programs": lines}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
