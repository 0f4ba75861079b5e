"""Compiles the gradient program of grpo for TPUs without a device; `tpu_compile.py` runs this script.

    python scripts/bench/gradients_of_grpo.py '{"preset": NAME, "slice": NAME, "config": {...}, ...}' DIRECTORY

The script compiles like `grpo inspect-mesh --compile`, and writes the program of the largest micro-batch and
figures.json into the directory.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from app.mesh.chips import parse_slice
from app.preflight.compiled_programs import compile_programs
from app.preflight.inspect_mesh import open_step_outline
from app.preflight.phase_memory import largest_micro_batch
from scripts.bench.kernel_time import kernel_schedules
from scripts.bench.tpu_time import TimedPrograms
from settings import load

FIGURES = ("argument_bytes", "output_bytes", "temporary_bytes")
TIMES = ("estimated_s", "parts_s")


def main() -> None:
    work, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    (directory / "config.json").write_text(json.dumps(work["config"]))
    changes = [f"model.path={directory}", f"mesh.pretend={work['slice']}", "mesh.platform=auto"]
    changes += [f"data.max_prompt_length={work['prompt']}", f"rollout.max_new_tokens={work['completion']}"]
    changes += [f"rollout.group_size={work['group_size']}"]
    changes += [f"rollout.prompts_per_step={work['rows'] // work['group_size']}"]
    kernel_schedules()
    step = open_step_outline(load(work["preset"], [*changes, "eval.every_steps=0"], {}), compiles=True)
    # Only the update is compiled.
    step = replace(step, reward_model=None, rollout=None, evaluation=None, scores={})
    timed = TimedPrograms(step, parse_slice(work["slice"]).chip, directory)
    programs = compile_programs(step)
    gradients, text = next(one for one in programs if one[0].name == "gradients")
    timed.add(gradients, text)
    figures = {
        "rows": sum(len(segment) for row in largest_micro_batch(step.update).rows for segment in row),
        "versions": {name: version(name) for name in ("libtpu", "jax")},
        **{name: getattr(gradients, name) for name in FIGURES},
        **{name: timed.times[-1][name] for name in TIMES},
    }
    (directory / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
