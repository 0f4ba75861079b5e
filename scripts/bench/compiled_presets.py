"""Compiles the programs of every accelerator preset with the compiler of the target device.

    python scripts/bench/compiled_presets.py [PRESET ...] [--out FILE.json]

For each preset, the script runs `grpo inspect-mesh --compile` (GPUs) or `tpu_time.py` (TPUs) on the model's
`config.json` alone. It needs neither weights nor an accelerator, only the compiler: `pip install -e '.[tpu]'` or
`'.[cuda]'`. Times are the compiler's estimates for the longest prompts and answers. The tests of `scripts/test.sh
--compile` compare each preset with the JSON file that this script writes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from app.mesh.chips import GPU_HOSTS
from app.model.architecture import token_flops
from app.model.io.families import architecture_from_config
from app.model.token_logprobs import LM_HEAD_SCOPE
from app.records.text_format import format_bytes, format_percent, format_table
from scripts.bench.hlo_flops import product_flops
from scripts.bench.kernel_time import ROUTED_ROWS
from scripts.bench.shapes import MODELS
from settings import load
from settings.loading.config_file import preset_names

RESULTS = Path(__file__).resolve().parent / "results" / "compiled_presets.json"
DEVICES = {
    **{"v5e_8": "v5e-8", "v5e_16": "v5e-16", "v6e_8": "v6e-8", "v6e_32": "v6e-32"},
    **{"v4_16": "v4-16", "v5p_64": "v5p-64"},
}
"""Maps a part of the name of an accelerator preset to its devices; all other presets are for one H100."""
REAL = ("gsm8k", "math")
"""Prefixes of the names of accelerator presets."""
COMPILERS = {"h100-1": "jax_cuda13_plugin"}
"""Maps devices to the module with their compiler; the default is libtpu."""
FIELDS = ("argument_bytes", "temporary_bytes", "estimated_s", "parts_s", "mfu", "collective_bytes")
GRPO = "import sys; from cli import main; sys.exit(main())"


def devices_of(preset: str) -> str | None:
    """Returns the devices of a preset, such as `v5e-8`; None if it is not for accelerators."""
    if not preset.startswith(REAL):
        return None
    return next((devices for part, devices in DEVICES.items() if part in preset), "h100-1")


def accelerator_presets() -> list[str]:
    return [preset for preset in preset_names() if devices_of(preset)]


def missing_compiler(preset: str) -> str | None:
    """Returns the module with the compiler for a preset if it is not installed; None if it is installed."""
    module = COMPILERS.get(devices_of(preset) or "", "libtpu")
    return None if find_spec(module) else module


def model_of(preset: str) -> str:
    return load(preset, [], {}).settings.model.path.split("/")[-1].removesuffix("-Instruct")


def without_weights(preset: str, folder: str, model: str | None = None) -> tuple[str, ...]:
    """Writes `config.json` of a model into `folder`, by default of the preset's model, without weights.

    Returns the settings for compiling with this model and the preset's devices, which this machine need not have.
    """
    (Path(folder) / "config.json").write_text(json.dumps(MODELS[model or model_of(preset)]))
    return f"model.path={folder}", f"mesh.pretend={devices_of(preset)}", "mesh.platform=auto"


def passes_of_experts(preset: str, gradients: str) -> float | None:
    """Returns the FLOPs of the gradient program divided by the FLOPs of a forward pass with the active experts.

    Returns None for models without experts. LM head and attention kernels are not counted.

    Args:
        gradients: text of the compiled program.
    """
    architecture, settings = architecture_from_config(MODELS[model_of(preset)]), load(preset, [], {}).settings
    tokens = settings.algorithm.max_tokens_per_device
    if architecture.num_experts is None or tokens is None:
        return None
    tp = int(settings.mesh.shape.rpartition(",")[2])
    turns = {ROUTED_ROWS: tokens * architecture.experts_per_token // tp, LM_HEAD_SCOPE: 1}
    flops = product_flops(gradients, turns)
    return (flops["grouped"] + flops["other"]) * tp / (tokens * token_flops(architecture))


def compiled(preset: str) -> dict[str, Any]:
    """Compiles a preset's programs, and returns its devices, its model, and the figures of each program."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = without_weights(preset, folder)
        sets = [word for one in overrides for word in ("--set", one)]
        inspect_mesh = ["-c", GRPO, "inspect-mesh", "--compile"]
        program = inspect_mesh if devices_of(preset) in GPU_HOSTS else [str(RESULTS.parents[1] / "tpu_time.py")]
        command = [sys.executable, *program, "--config", preset, *sets, "--json", "--hlo", folder]
        # The caller may request quick compilation, like the tests do, but users do not compile like this.
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RuntimeError(f"{preset}: {done.stderr.strip().splitlines()[-1]}")
        passes = passes_of_experts(preset, (Path(folder) / "update_gradients.hlo").read_text())
    found = json.loads(done.stdout)
    programs = {
        f"{one['phase']}/{one['name']}": _known({name: one.get(name) for name in FIELDS}) for one in found["programs"]
    }
    return _known(
        {
            "devices": devices_of(preset),
            "model": model_of(preset),
            "peak_bytes": found["peak_bytes"],
            "passes_of_experts": passes,
            "programs": programs,
        }
    )


def _known(figures: dict[str, Any]) -> dict[str, Any]:
    return {name: figure for name, figure in figures.items() if figure is not None}


def to_text(preset: str, one: dict[str, Any]) -> str:
    rows = [
        (
            name,
            *(format_bytes(program[field]) for field in ("argument_bytes", "temporary_bytes")),
            "-" if "estimated_s" not in program else f"{program['estimated_s'] * 1e3:.2f} ms",
            "-" if "mfu" not in program else format_percent(program["mfu"]),
        )
        for name, program in one["programs"].items()
    ]
    table = format_table(rows, header=(f"{preset} on {one['devices']}", "arguments", "temporaries", "time", "MFU"))
    return f"{table}\npeak on each device: {format_bytes(one['peak_bytes'])}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("presets", nargs="*", metavar="PRESET", help="all presets for accelerators if none is given")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = json.loads(options.out.read_text()) if options.out.exists() else {"presets": {}}
    for preset in options.presets or accelerator_presets():
        if module := missing_compiler(preset):
            print(f"{preset}: {module} is not installed; the record keeps what it has", file=sys.stderr)
            continue
        one = compiled(preset)
        print(to_text(preset, one), flush=True)
        record["presets"][preset] = {"date": datetime.now(UTC).date().isoformat(), "jax": version("jax"), **one}
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
