"""Compares the memory for training LoRA adapters, adapters on a quantized base, and all weights; runs no program.

    python scripts/bench/lora_memory.py [--shapes SmolLM2-135M,Qwen2.5-1.5B] [--rank 8] [--out FILE.json] [--set a.b=c]

For each shape, on one device, the script reports the number of trained parameters; the memory of weights, reference,
moments and summed gradients; the size of a checkpoint; and the peak memory of an optimizer step, whose two programs are
compiled by the backend of this machine. Ratios are relative to training all weights. No weights are loaded.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from shapes import QWEN2_5, SMOLLM2

from app.mesh import jax_startup
from app.mesh.devices import program_memory_bytes
from app.mesh.placement import bytes_per_device
from app.model.quantization import QUANTIZE_BASE_SETTING
from app.preflight.compiled_programs import lower_update
from app.preflight.inspect_mesh import make_longest_prompt, read_config_only_spec
from app.preflight.phase_memory import memory_by_phase, outline_step, state_bytes
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.learner import make_learner_group
from settings import load

RESULTS = Path(__file__).resolve().parent / "results" / "lora_memory.json"
SHAPES = {**SMOLLM2, **QWEN2_5}
RUN = (
    *("mesh.shape=1,1,1", "model.dtype=float32", "model.remat=block", "algorithm.beta=0.04", "eval.every_steps=0"),
    *("data.max_prompt_length=512", "rollout.max_new_tokens=1024", "rollout.prompts_per_step=16"),
    *("rollout.group_size=8", "algorithm.max_tokens_per_device=8192"),
)
"""Settings of every case. They use float32, because the CPU compiler makes float32 copies for bfloat16 matmuls."""


def measured(shape: str, overrides: list[str]) -> dict[str, int]:
    """Returns the number of trained parameters, and the bytes of each kind of memory, under `overrides`."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, **SHAPES[shape]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = load(None, [*RUN, f"model.path={folder}", *overrides], {}).settings
        outline = read_config_only_spec(settings)
    jax_startup.initialize_distributed(settings.mesh)
    session = Session.open(ScoringSession.open(settings, outline.model), generates=None)
    learning = make_learner_group(session.scoring)
    step = outline_step(session, learning, [make_longest_prompt(settings.data.max_prompt_length)], [], None)
    memory = memory_by_phase(step)
    state = learning.policy.layout
    moments = bytes_per_device(state) - bytes_per_device(state.params)
    programs = lower_update(session, learning.policy, step.update)
    reserved = {name: program_memory_bytes(lowered.compile()) for name, lowered in programs.items()}
    # Moments stay in memory while gradients are computed; frozen weights and the reference stay during both programs.
    frozen, reference = bytes_per_device(learning.policy.frozen_layout), memory["score"].get("reference", 0)
    peak = max(reserved["gradients"] + moments, reserved["optimizer"] + frozen) + reference
    return {
        "trained_parameters": session.model_spec.policy_definition.num_trainable,
        "weights": memory["update"]["weights"],
        "reference": reference,
        "moments": moments,
        "gradients": memory["update"]["gradients"],
        "checkpoint": state_bytes(learning),
        "peak_of_update": peak,
    }


def compared(shape: str, rank: int, overrides: list[str]) -> dict[str, Any]:
    """Prints and returns `measured` for each kind of training, with ratios relative to training all weights."""
    adapters = f"model.lora.rank={rank}"
    kinds = {
        "lora": [adapters],
        **{kind: [adapters, f"{QUANTIZE_BASE_SETTING}={kind}"] for kind in ("int8", "nf4")},
        "full": [],
    }
    found = {kind: measured(shape, [*chosen, *overrides]) for kind, chosen in kinds.items()}
    print(f"\n{shape}, adapters of rank {rank}; MiB, and the share of what all weights take")
    print(f"{'':<20}" + "".join(f"{kind:>24}" for kind in found))
    ratios = {
        kind: {name: round(value / found["full"][name], 4) for name, value in one.items()}
        for kind, one in found.items()
        if kind != "full"
    }
    for name in found["full"]:
        scale = 1 if name == "trained_parameters" else 2**20
        cells = (f"{one[name] / scale:,.1f} {ratios.get(kind, {}).get(name, 1):.4f}" for kind, one in found.items())
        print(f"{name:<20}" + "".join(f"{cell:>24}" for cell in cells))
    return {"shape": shape, "rank": rank, **found, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="SmolLM2-135M,Qwen2.5-1.5B")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "backend": jax.default_backend(),
        "settings": [*RUN, *options.overrides],
        "measured": [compared(shape, options.rank, options.overrides) for shape in options.shapes.split(",")],
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
