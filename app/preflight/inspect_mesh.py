"""`grpo inspect-mesh`: reports mesh layout and the memory of each phase, without loading weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from app.distributed.error_barrier import error_barrier
from app.distributed.host_consistency import check_hosts_agree
from app.mesh import device_mesh, jax_startup
from app.mesh.device_memory import device_memory_bytes
from app.model.decode_weights import transferred_bytes
from app.model.decoder import flatten_by_path
from app.preflight.compiled_programs import CompiledProgram, ProgramCallback, format_step_memory, step_memory
from app.preflight.config_only_spec import read_config_only_spec
from app.preflight.mesh_layout import MeshLayout, mesh_layout
from app.preflight.phase_memory import StepShapes, compute_step_shapes, peak_phase
from app.records.atomic_write import write_atomic
from app.records.sample import Prompt
from app.records.text_format import format_bytes
from app.runtime.model_spec import CriticSpec
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.learner import LearnerGroup
from app.training.network_memory import MemoryBreakdown, host_bytes
from app.training.setup import open_session, setup_notes
from settings import Resolved


@dataclass(frozen=True)
class MeshInspection:
    """Layout and memory, in bytes on each device, for the longest prompts and completions under the settings."""

    layout: MeshLayout
    generation: str
    transferred_bytes: int
    """Bytes that reach each device when trained weights go to the layout that generates, once per policy version."""
    memory: Mapping[str, MemoryBreakdown]
    """Memory by phase and buffer; temporaries only with `--compile`."""
    peak_bytes: int
    host_bytes: int
    """Bytes that settings keep in host memory for each device."""
    notes: tuple[str, ...] = ()
    programs: tuple[CompiledProgram, ...] = ()
    """Compiled programs; empty without `--compile`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON."""
        rest = asdict(self)
        return {**rest.pop("layout"), **rest, "peak_phase": peak_phase(self.memory)}

    def to_text(self) -> str:
        """Returns the report as readable text."""
        lines = [self.layout.to_text(), *self.notes, f"\nrollout: {self.generation}"]
        moved = format_bytes(self.transferred_bytes)
        lines.append(f"weights to the rollout's layout: {moved} into each device for a policy version")
        if self.host_bytes:
            lines.append(f"host memory: {format_bytes(self.host_bytes)} for each device")
        memory = format_step_memory(self.memory, self.programs, available_bytes=self.layout.device_memory_bytes)
        return "\n".join([*lines, "", memory])


class RunOutline(NamedTuple):
    """A run opened from its settings and the `config.json` of its models alone."""

    session: Session
    learning: LearnerGroup
    reward_model: CriticSpec | None
    shapes: StepShapes
    """Those of the longest prompts and completions that the settings allow."""


def open_run_outline(resolved: Resolved, *, compiles: bool) -> RunOutline:
    """Joins the other hosts and opens a run, whose networks are never loaded; `compiles` is that of `inspect_mesh`.

    Raises:
        InputError: the settings or a configuration cannot be used, or rows do not divide evenly over the devices.
    """
    settings = resolved.settings
    spec = read_config_only_spec(settings)
    jax_startup.initialize_distributed(settings.mesh, compiles=compiles)
    check_hosts_agree(resolved)
    scoring = ScoringSession.open(settings, spec.model, spec.critic, trains=True)
    session, learning = open_session(scoring, spec.reward_model)
    prompt = make_longest_prompt(settings.data.max_prompt_length)
    # Without the data, the number of held-out prompts is unknown: assumes full batches on all hosts.
    num_held_out = settings.eval.num_prompts or num_samples_per_step(session)
    held_out = [prompt] * num_held_out if settings.eval.every_steps else []
    shapes = compute_step_shapes(session, learning, [prompt], held_out, spec.reward_model)
    return RunOutline(session, learning, spec.reward_model, shapes)


def inspect_mesh(resolved: Resolved, *, compiles: bool, hlo: Path | None = None) -> MeshInspection:
    """Returns the layout of weights, rows and workers under these settings, and the memory of each phase.

    Args:
        compiles: whether to compile the programs of every phase for the devices of the mesh.
        hlo: folder for the texts of the compiled programs.

    Raises:
        InputError: see `open_run_outline`; or a program does not fit.
    """
    outline = open_run_outline(resolved, compiles=compiles)
    # Keeps the hosts together until the end: if one exits early, JAX times out on the others.
    with error_barrier():
        on_program = None if hlo is None else partial(write_program, hlo)
        return build_mesh_inspection(outline, compiles=compiles, on_program=on_program)


def write_program(folder: Path, program: CompiledProgram, text: str) -> None:
    """Writes the text of a compiled program into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{program.phase}_{program.name}.hlo", text.encode())


def build_mesh_inspection(
    outline: RunOutline, *, compiles: bool, on_program: ProgramCallback | None = None
) -> MeshInspection:
    """Returns the report on a run, without loading its networks."""
    session, learning, reward_model, shapes = outline
    memory, programs = step_memory(session, learning, shapes, reward_model, compiles=compiles, on_program=on_program)
    definition, conversion = session.model_spec.policy_definition, session.to_decode_weights
    weights, dims = flatten_by_path(definition.shapes), flatten_by_path(definition.dims)
    return MeshInspection(
        layout=mesh_layout(
            session.mesh,
            {".".join(path): (weights[path], dims[path]) for path in weights},
            num_parameters=definition.num_parameters,
            samples_per_step=num_samples_per_step(session),
            memory_bytes=device_memory_bytes(),
        ),
        generation=_describe_generation(session, shapes),
        transferred_bytes=transferred_bytes(
            conversion.definition, session.mesh, conversion.mesh_of_all_hosts, jnp.dtype(session.settings.model.dtype)
        ),
        memory=memory,
        peak_bytes=sum(memory[peak_phase(memory)].values()),
        host_bytes=host_bytes(session.scoring, learning),
        notes=setup_notes(session.settings, session),
        programs=programs,
    )


def num_samples_per_step(session: Session) -> int:
    """Returns the samples of a step over all hosts."""
    rollout = session.settings.rollout
    return rollout.prompts_per_step * rollout.group_size * device_mesh.num_hosts(session.mesh)


def make_longest_prompt(num_tokens: int) -> Prompt:
    """Returns a prompt as long as `data.max_prompt_length` allows."""
    return Prompt("longest", np.zeros(num_tokens, np.int32), "", None)


def _describe_generation(session: Session, shapes: StepShapes) -> str:
    assert shapes.rollout is not None
    rows = f"{shapes.rollout.num_rows:,} rows with a cache of {shapes.rollout.cache_length:,} tokens"
    if session.workers is not None:
        return f"{len(session.workers.workers)} workers on each host, the largest with {rows}"
    return f"{rows.replace('rows', 'slots', 1)} on each host"
