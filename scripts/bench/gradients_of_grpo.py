"""Compiles our gradients for TPUs that are not there; `tpu_compile.py` runs this.

    python scripts/bench/gradients_of_grpo.py '{"preset": NAME, "slice": NAME, "config": {...}, ...}' DIRECTORY

Writes program.hlo and figures.json into the directory: the program of the largest micro-batch, as `grpo inspect-mesh
--compile` compiles it.
"""

from __future__ import annotations

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from app.mesh import jax_startup
from app.mesh.compile_only import kernel_schedules
from app.preflight.compiled_programs import lower_update
from app.preflight.config_only_spec import read_config_only_spec
from app.preflight.inspect_mesh import make_longest_prompt
from app.preflight.kernel_time import take_scheduled_bundles
from app.preflight.memory import compute_step_shapes, largest_micro_batch
from app.preflight.program_work import longest_samples, packed_pass_work
from app.runtime.session import Session
from app.training.learner import make_learner_group
from settings import load


def main() -> None:
    work, directory = json.loads(sys.argv[1]), Path(sys.argv[2])
    (directory / "config.json").write_text(json.dumps(work["config"]))
    lengths, group_size = {name: work[name] for name in ("prompt", "completion")}, work["group_size"]
    changes = [f"model.path={directory}", f"mesh.pretend={work['slice']}", "mesh.platform=auto"]
    changes += [f"data.max_prompt_length={work['prompt']}", f"rollout.max_new_tokens={work['completion']}"]
    changes += [f"rollout.group_size={group_size}", f"rollout.prompts_per_step={work['rows'] // group_size}"]
    settings = load(work["preset"], changes, {}).settings
    spec = read_config_only_spec(settings)
    jax_startup.initialize_distributed(settings.mesh, compiles=True)
    session = Session.open(settings, spec.model, spec.critic)
    learning = make_learner_group(settings, session)
    plan = compute_step_shapes(session, learning, [make_longest_prompt(lengths["prompt"])], []).update
    largest = largest_micro_batch(plan)
    passed = packed_pass_work(
        session.architecture_of("policy"),
        session.mesh,
        longest_samples(work["rows"], **lengths),
        largest,
        logits_chunk=settings.model.logits_chunk,
        has_gradients=True,
    )
    compiled = lower_update(session, learning.policy, plan)["gradients"].compile()
    memory: Any = compiled.memory_analysis()
    (directory / "program.hlo").write_text(compiled.as_text() or "")
    figures = {
        "rows": sum(len(segment) for row in largest.rows for segment in row),
        "argument_bytes": memory.argument_size_in_bytes,
        "output_bytes": memory.output_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "versions": {name: version(name) for name in ("libtpu", "jax")},
        "turns": dict(passed.turns),
        "bundles": take_scheduled_bundles(kernel_schedules()),
    }
    (directory / "figures.json").write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
