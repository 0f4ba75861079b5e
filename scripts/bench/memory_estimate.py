"""What `grpo inspect-mesh` foresees of a device's memory, against what the compiler reserves: nothing is run.

    python scripts/bench/memory_estimate.py [--shapes tiny,...] [--slices v5e-8,v4-16] [--out FILE.json] [--set a.b=c]

For each shape, slice and program: arguments, outputs and temporaries of the compiled program (here, the CPU's compiler
on virtual devices), and the temporaries that the table of `inspect-mesh` foresees, as a ratio to those. Networks are
those of the sizes in `SHAPES`; there are no weights.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
from shapes import QWEN2_5

from app.mesh import jax_startup
from app.preflight.compiled_programs import format_programs_table
from app.preflight.config_only_spec import read_config_only_spec
from app.preflight.inspect_mesh import build_mesh_inspection
from app.runtime.session import Session
from settings import load

RESULTS = Path(__file__).resolve().parent / "results" / "memory_estimate.json"
TINY = {
    **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "tie_word_embeddings": False, "rope_theta": 1e4},
}
SMOLLM2 = {
    **{"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
    **{"num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "vocab_size": 49152},
    "rope_theta": 1e5,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "SmolLM2-135M": SMOLLM2,
    **{name: QWEN2_5[name] for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B", "Qwen2.5-3B")},
}
RUN = (
    *("model.dtype=float32", "model.remat=block", "data.max_prompt_length=512", "rollout.max_new_tokens=1024"),
    *("rollout.prompts_per_step=16", "rollout.group_size=8", "algorithm.max_tokens_per_device=8192"),
    *("algorithm.beta=0.04", "eval.every_steps=0"),
)
"""The historic GSM8K run, with a reference model for a scoring pass.

It is in float32, because the CPU's compiler multiplies bfloat16 by float32 copies, which no TPU makes.
"""


def measured(shape: str, slice_name: str, overrides: list[str]) -> dict[str, Any]:
    """Returns the programs of one network on one slice, and their estimates."""
    with tempfile.TemporaryDirectory() as folder:
        config = {"max_position_embeddings": 32_768, "rms_norm_eps": 1e-6, **SHAPES[shape]}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        chosen = {name: value for name, _, value in (text.partition("=") for text in (*RUN, *overrides))}
        chosen |= {"model.path": folder, "mesh.pretend": slice_name}
        settings = load(None, [f"{name}={value}" for name, value in chosen.items()], {}).settings
        outline = read_config_only_spec(settings)
    jax_startup.initialize_distributed(settings.mesh)
    found = build_mesh_inspection(Session.open(settings, outline.model, outline.critic), outline, compiles=True)
    print(f"\n{shape} on {slice_name}, {found.mesh.num_parameters:,} parameters, mesh {settings.mesh.shape}")
    print(format_programs_table(found.programs), flush=True)
    programs = [asdict(one) | {"ratio": _ratio(one.estimated_bytes, one.temporary_bytes)} for one in found.programs]
    return {
        **{"shape": shape, "slice": slice_name, "num_parameters": found.mesh.num_parameters},
        **{"mesh": found.mesh.shape, "programs": programs},
    }


def _ratio(foreseen: int | None, reserved: int) -> float | None:
    return None if foreseen is None else round(foreseen / reserved, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--slices", default="v5e-8,v4-16", help="all with as many chips: a process has one number")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=c", dest="overrides")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = [
        measured(shape, slice_name, options.overrides)
        for shape in options.shapes.split(",")
        for slice_name in options.slices.split(",")
    ]
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": jax.__version__,
        "settings": [*RUN, *options.overrides],
        "measured": found,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
