"""Compiles our gradients for TPUs that are not there; `tpu_compile.py` runs this.

    python scripts/bench/gradients_of_grpo.py '{"preset": NAME, "slice": NAME, "config": {...}, ...}' DIRECTORY

Writes the program's text and figures.json into the directory: the program of the largest micro-batch, as `grpo
inspect-mesh --compile` compiles it.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path

from app.mesh import jax_startup
from app.preflight.compiled_programs import compile_programs
from app.preflight.config_only_spec import read_config_only_spec
from app.preflight.inspect_mesh import make_longest_prompt
from app.preflight.memory import compute_step_shapes, largest_micro_batch
from app.runtime.session import Session
from app.training.learner import make_learner_group
from settings import load

FIGURES = ("argument_bytes", "output_bytes", "temporary_bytes", "estimated_s", "parts_s")


def main() -> None:
    work, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    (directory / "config.json").write_text(json.dumps(work["config"]))
    changes = [f"model.path={directory}", f"mesh.pretend={work['slice']}", "mesh.platform=auto"]
    changes += [f"data.max_prompt_length={work['prompt']}", f"rollout.max_new_tokens={work['completion']}"]
    changes += [f"rollout.group_size={work['group_size']}"]
    changes += [f"rollout.prompts_per_step={work['rows'] // work['group_size']}"]
    settings = load(work["preset"], changes, {}).settings
    spec = read_config_only_spec(settings)
    jax_startup.initialize_distributed(settings.mesh, compiles=True)
    session = Session.open(settings, spec.model, spec.critic, generates=None)
    learning = make_learner_group(settings, session)
    shapes = compute_step_shapes(session, learning, [make_longest_prompt(work["prompt"])], [])
    programs = compile_programs(session, learning, shapes, None, directory)
    gradients = next(one for one in programs if one.name == "gradients")
    figures = {
        "rows": sum(len(segment) for row in largest_micro_batch(shapes.update).rows for segment in row),
        "versions": {name: version(name) for name in ("libtpu", "jax")},
        **{name: getattr(gradients, name) for name in FIGURES},
    }
    (directory / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
