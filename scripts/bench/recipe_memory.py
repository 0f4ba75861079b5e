"""What a step of each GSM8K preset of Qwen2.5 holds on a device, phase by phase: nothing is run or downloaded.

    python scripts/bench/recipe_memory.py [--out FILE.json]

`grpo inspect-mesh` of the preset, with a `config.json` of the model's sizes in place of the model. A TPU preset stands
on its pretended slice; one for a GPU on a single chip of a v6e, because bytes follow from shapes: that chip's own
32 GiB are not reported. How near such estimates come to what a compiler reserves: `memory_estimate.py`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from shapes import QWEN2_5

from settings import load
from settings.loading.config_file import preset_names

RESULTS = Path(__file__).resolve().parent / "results" / "recipe_memory.json"
ONE_DEVICE = "v6e-1"
SLICES = {"v5e_8": "v5e-8", "v6e_8": "v6e-8", "v4_16": "v4-16"}
"""Slices by the end of a preset's name."""
VARIANTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "gsm8k_qwen2_5_0_5b_gpu": (("rollout.slots=64",),),
    "gsm8k_qwen2_5_1_5b_gpu": (("rollout.slots=64",), ("rollout.slots=64", "model.lora.rank=32")),
    "gsm8k_ppo": (("rollout.slots=64",),),
}
"""Changes of a preset in the runbooks, in addition to the preset itself."""
GRPO = "import sys; from cli import main; sys.exit(main())"


def recipes() -> dict[str, str]:
    """Maps a preset to the model of `shapes.QWEN2_5` that it trains."""
    paths = {preset: load(preset, [], {}).settings.model.path for preset in preset_names()}
    sizes = {name: path.split("/")[-1].removesuffix("-Instruct") for name, path in paths.items()}
    return {preset: model for preset, model in sizes.items() if model in QWEN2_5}


def slice_of(preset: str) -> str:
    """Returns the slice on which a preset is inspected."""
    return next((place for end, place in SLICES.items() if preset.endswith(end)), ONE_DEVICE)


def inspected(preset: str, model: str, changes: tuple[str, ...]) -> dict[str, Any]:
    """Returns the bytes of each phase, of the fullest phase, and of a checkpoint."""
    place = slice_of(preset)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN2_5[model]))
        overrides = [f"--set={one}" for one in (f"model.path={folder}", f"mesh.pretend={place}", *changes)]
        command = [sys.executable, "-c", GRPO, "inspect-mesh", "--config", preset, *overrides, "--json"]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    chosen = load(preset, list(changes), {}).settings
    return {
        "preset": preset,
        "changes": changes,
        "model": model,
        "devices": "one GPU" if place == ONE_DEVICE else place,
        "phases": {phase: sum(held.values()) for phase, held in told["memory"].items()},
        "peak_phase": told["peak_phase"],
        "peak_bytes": told["peak_bytes"],
        "memory_bytes": None if place == ONE_DEVICE else told["topology"]["memory_bytes"],
        # Float32 weights and two moments; the head of a critic is not counted, and adapters alone are far smaller.
        "checkpoint_bytes": None if chosen.model.lora.rank else (1 + chosen.has_critic) * 12 * told["num_parameters"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = []
    wanted = [
        (preset, model, changes) for preset, model in recipes().items() for changes in ((), *VARIANTS.get(preset, ()))
    ]
    for preset, model, changes in wanted:
        one = inspected(preset, model, changes)
        found.append(one)
        phases = ", ".join(f"{phase} {size / 2**30:.1f}" for phase, size in one["phases"].items())
        there = f" of {one['memory_bytes'] / 2**30:.0f}" if one["memory_bytes"] else ""
        saved = f"; checkpoint {one['checkpoint_bytes'] / 2**30:.1f}" if one["checkpoint_bytes"] else ""
        print(
            f"{' '.join((preset, *changes)):<60}{one['devices']:<9}peak {one['peak_bytes'] / 2**30:.1f}{there} GiB "
            f"({one['peak_phase']}); {phases}{saved}",
            flush=True,
        )
    record = {"date": datetime.now(UTC).date().isoformat(), "recipes": found}
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
