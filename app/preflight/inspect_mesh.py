"""`grpo inspect-mesh`: reports mesh layout and the memory of each phase, without loading weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from app.distributed.error_barrier import error_barrier
from app.distributed.host_consistency import check_hosts_agree
from app.mesh import device_mesh, jax_startup
from app.mesh.chips import find_chip
from app.mesh.device_memory import device_memory_bytes
from app.mesh.devices import device_kind
from app.mesh.placement import bytes_per_device
from app.model.decode_weights import transferred_bytes
from app.model.decoder import flatten_by_path
from app.preflight.compiled_programs import CompiledProgram, ProgramCallback, format_step_memory, step_memory
from app.preflight.config_only_spec import read_config_only_spec
from app.preflight.mesh_layout import MeshLayout, mesh_layout
from app.preflight.phase_memory import (
    StepShapes,
    compute_step_shapes,
    peak_phase,
)
from app.records.atomic_write import write_atomic
from app.records.sample import Prompt
from app.records.text_format import format_bytes, format_ranges, format_table
from app.runtime.model_spec import CriticSpec
from app.runtime.session import Session
from app.training.learner import LearnerGroup
from app.training.network_memory import MemoryBreakdown, MomentBytes, moment_bytes
from app.training.setup import configure_session, setup_notes
from settings import Resolved


@dataclass(frozen=True)
class WorkerPlacement:
    """One worker of `rollout.workers`; every host has the same workers on its own devices."""

    name: str
    devices: tuple[int, ...]
    """Ids of the worker's devices on this host."""
    mesh: Mapping[str, int]
    slots: int
    cache_bytes: int
    """Bytes of the worker's KV cache on each of its devices."""


@dataclass(frozen=True)
class WeightTransfer:
    """The move of trained weights to the layout in which they generate, once per policy version."""

    received_bytes: int
    """Bytes that reach each device of `mesh.shape` from others."""
    link_s: float | None
    """Seconds of these over all links of a chip, which is the least; None if their bandwidth is unknown."""
    copied_bytes: int
    """Bytes that each device of `rollout.devices` then gets from those that train; 0 without."""

    def to_text(self) -> str:
        least = "" if self.link_s is None else f", at least {self.link_s * 1e3:.1f} ms over its links"
        copied = f", then {format_bytes(self.copied_bytes)} into each that generates" if self.copied_bytes else ""
        moved = f"{format_bytes(self.received_bytes)} into each device for a policy version"
        return f"weights to the rollout's layout: {moved}{least}{copied}"


@dataclass(frozen=True)
class MeshInspection:
    """Layout and memory, in bytes on each device, for the longest prompts and completions under the settings."""

    layout: MeshLayout
    generation: str
    weight_transfer: WeightTransfer
    workers: tuple[WorkerPlacement, ...]
    memory: Mapping[str, MemoryBreakdown]
    """Memory by phase and buffer; temporaries only with `--compile`."""
    peak_bytes: int
    moments: tuple[MomentBytes, ...]
    notes: tuple[str, ...] = ()
    programs: tuple[CompiledProgram, ...] = ()
    """Compiled programs; empty without `--compile`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as values for JSON."""
        rest = asdict(self)
        return {**rest.pop("layout"), **rest, "peak_phase": peak_phase(self.memory)}

    def to_text(self) -> str:
        """Returns the report as readable text."""
        lines = [self.layout.to_text(), *self.notes, f"\nrollout: {self.generation}", self.weight_transfer.to_text()]
        if self.workers:
            header = ("worker", "devices", "dp, fsdp, tp", "slots", "caches on each device")
            rows = [
                (
                    *(one.name, format_ranges(one.devices), ", ".join(map(str, one.mesh.values()))),
                    *(str(one.slots), format_bytes(one.cache_bytes)),
                )
                for one in self.workers
            ]
            lines.append(format_table(rows, header=header, num_left=3))
        rows = [
            (one.network, one.moment, one.dtype, f"{one.place} memory", format_bytes(one.bytes_per_device))
            for one in self.moments
        ]
        moments = format_table(rows, header=("moments of", "", "type", "in", "for each device"), num_left=4)
        memory = format_step_memory(self.memory, self.programs, available_bytes=self.layout.device_memory_bytes)
        return "\n".join([*lines, "", moments, "", memory])


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
    session = Session.open(settings, spec.model, spec.critic, trains=True)
    learning = configure_session(session, spec.reward_model)
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
    definition = session.model_spec.policy_definition
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
        weight_transfer=_weight_transfer(session),
        workers=tuple(_worker_placements(session)),
        memory=memory,
        peak_bytes=sum(memory[peak_phase(memory)].values()),
        moments=moment_bytes(learning),
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


def _weight_transfer(session: Session) -> WeightTransfer:
    settings, conversion, chip = (
        session.settings,
        session.to_decode_weights,
        find_chip(device_kind(session.mesh.devices.flat[0])),
    )
    dtype = jnp.dtype(settings.model.dtype)
    received = transferred_bytes(conversion.definition, session.mesh, conversion.mesh_of_all_hosts, dtype)
    copied = 0
    if session.generation_devices:
        assert session.workers is not None
        copied = bytes_per_device(session.workers.footprint().weights)
    return WeightTransfer(received, chip and received / chip.ici_bytes_per_s, copied)


def _worker_placements(session: Session) -> Iterator[WorkerPlacement]:
    for worker in session.workers.workers if session.workers is not None else ():
        footprint = worker.engine.footprint()
        mesh = jax.tree.leaves(footprint.slots)[0].sharding.mesh
        devices, size = tuple(device.id for device in mesh.devices.flat), bytes_per_device(footprint[1:])
        yield WorkerPlacement(worker.name, devices, dict(mesh.shape), worker.engine.shapes.num_slots, size)
