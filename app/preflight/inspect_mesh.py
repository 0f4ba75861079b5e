"""`grpo inspect-mesh`: where everything will lie, what it will hold, and what fits. Loads no weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import numpy as np

from app.distributed.host_consistency import check_hosts_agree
from app.distributed.lockstep import error_barrier
from app.mesh import topology
from app.mesh.device_memory import device_memory_bytes
from app.mesh.placement import bytes_per_device
from app.model.decoder import flatten_by_path
from app.preflight.activation_memory import MemoryBreakdown
from app.preflight.batch_limits import USABLE_MEMORY_FRACTION, BatchLimit, find_batch_limits
from app.preflight.compiled_memory import CompiledProgram, compile_programs, format_programs_table
from app.preflight.config_only_spec import ConfigOnlySpec, read_config_only_spec
from app.preflight.memory import StepShapes, compute_step_shapes, format_memory_table, memory_by_phase
from app.preflight.mesh_layout import MeshReport, format_id_ranges, mesh_report
from app.records.sample import Prompt
from app.runtime.batch_checks import check_fixed_micro_batches, check_host_offload
from app.runtime.session import Session
from app.training.learner import make_learner_group
from app.training.setup import setup_notes
from settings import Resolved


@dataclass(frozen=True)
class WorkerPlacement:
    """One worker of `rollout.workers`; every host has the same ones, on devices of its own."""

    name: str
    devices: tuple[int, ...]
    """Ids, of this host's."""
    mesh: Mapping[str, int]
    slots: int
    cache_bytes: int
    """On each of its devices: slots and the pool of prompts."""


@dataclass(frozen=True)
class MeshInspection:
    """Bytes are those of each device, at the longest prompts and completions that the settings allow."""

    mesh: MeshReport
    generation: str
    """How rows are generated, in words."""
    workers: tuple[WorkerPlacement, ...]
    memory: Mapping[str, MemoryBreakdown]
    """By phase. What `app.preflight.memory.LABELS` stars is estimated, the rest follows from shapes."""
    peak_bytes: int
    largest: tuple[BatchLimit, ...]
    """Empty where a device's memory is not known."""
    notes: tuple[str, ...] = ()
    """What a launch would say of the mesh."""
    programs: tuple[CompiledProgram, ...] = ()
    """Empty unless they were asked for."""

    @property
    def peak_phase(self) -> str:
        return max(self.memory, key=lambda phase: sum(self.memory[phase].values()))

    def to_dict(self) -> dict[str, Any]:
        rest = asdict(self)
        del rest["mesh"]
        return {**self.mesh.to_dict(), **rest, "peak_phase": self.peak_phase}

    def to_text(self) -> str:
        lines = [self.mesh.to_text(), *self.notes, "", f"rollout: {self.generation}", *self._worker_table()]
        lines += ["", *format_memory_table(self.memory), "", self._memory_summary()]
        lines += [f"  {one.to_text()}" for one in self.largest]
        if self.programs:
            lines += ["", *format_programs_table(self.programs)]
        return "\n".join(lines)

    def _worker_table(self) -> list[str]:
        if not self.workers:
            return []
        head = f"{'worker':<12}{'devices':<16}{'dp, fsdp, tp':<16}{'slots':>6}{'MiB of caches a device':>26}"
        return [head] + [
            f"{one.name:<12}{format_id_ranges(one.devices):<16}"
            f"{', '.join(map(str, one.mesh.values())):<16}{one.slots:>6}"
            f"{one.cache_bytes / 2**20:>26,.1f}"
            for one in self.workers
        ]

    def _memory_summary(self) -> str:
        peak, there = self.peak_bytes / 2**30, self.mesh.topology.memory_bytes
        if there is None:
            return f"{self.peak_phase} holds most, {peak:.2f} GiB on each device; how much it has is not known"
        share = self.peak_bytes / there
        fits = (
            "this does not fit"
            if share > 1
            else f"what fits under {USABLE_MEMORY_FRACTION:.0%} of it, one setting at a time"
        )
        return f"{self.peak_phase} holds most, {peak:.2f} GiB on each device, {share:.0%} of what it has; {fits}:"


def inspect_mesh(resolved: Resolved, *, compiles: bool) -> MeshInspection:
    """Where weights, rows and workers lie under these settings, and what each phase of a step holds.

    Args:
        compiles: also compiles the programs of every phase, for the devices that JAX has here.

    Raises:
        InputError: settings or a configuration that cannot be used, or rows that do not come out even.
    """
    settings = resolved.settings
    outline = read_config_only_spec(settings)
    topology.initialize_distributed(settings.mesh)
    check_hosts_agree(resolved)
    session = Session.open(settings, outline.model, outline.critic)
    check_fixed_micro_batches(settings, session)
    if settings.offloads_reference:
        check_host_offload(session.mesh)
    # Hosts meet at the end: one that is far ahead would run into JAX's own time-out for leaving.
    with error_barrier():
        return build_mesh_inspection(session, outline, compiles=compiles)


def build_mesh_inspection(session: Session, spec: ConfigOnlySpec, *, compiles: bool) -> MeshInspection:
    """The report of a session whose networks are not loaded."""
    settings, memory_bytes = session.settings, device_memory_bytes()
    learning = make_learner_group(settings, session)
    prompt = make_longest_prompt(settings.data.max_prompt_length)
    held_out = [prompt] * _num_held_out(session) if settings.eval.every_steps else []
    shapes = compute_step_shapes(session, learning, [prompt], held_out, spec.reward_model)
    memory = memory_by_phase(session, learning, shapes, spec.reward_model)
    return MeshInspection(
        mesh=_build_mesh_report(session, spec, memory_bytes),
        generation=_describe_generation(session, shapes),
        workers=_worker_placements(session),
        memory=memory,
        peak_bytes=max(sum(held.values()) for held in memory.values()),
        largest=tuple(find_batch_limits(session, shapes, memory, available_bytes=memory_bytes)) if memory_bytes else (),
        notes=setup_notes(settings, session),
        programs=compile_programs(session, learning, shapes, memory) if compiles else (),
    )


def _num_held_out(session: Session) -> int:
    """Of a whole data set nobody knows how many they are without reading it: enough for full batches on all hosts."""
    rollout = session.settings.rollout
    full = rollout.prompts_per_step * rollout.group_size * topology.num_hosts(session.mesh)
    return session.settings.eval.num_prompts or full


def make_longest_prompt(num_tokens: int) -> Prompt:
    """One as long as `data.max_prompt_length` allows."""
    return Prompt("longest", np.zeros(num_tokens, np.int32), "", None)


def _build_mesh_report(session: Session, spec: ConfigOnlySpec, memory_bytes: int | None) -> MeshReport:
    definition, rollout = spec.model.policy_definition, session.settings.rollout
    shapes, dims = flatten_by_path(definition.shapes), flatten_by_path(definition.dims)
    return mesh_report(
        session.mesh,
        {".".join(path): (shapes[path], dims[path]) for path in shapes},
        num_parameters=definition.num_parameters,
        samples_per_step=rollout.prompts_per_step * rollout.group_size * topology.num_hosts(session.mesh),
        memory_bytes=memory_bytes,
    )


def _describe_generation(session: Session, shapes: StepShapes) -> str:
    assert shapes.rollout is not None
    rows = f"{shapes.rollout.num_rows:,} rows with a cache of {shapes.rollout.cache_length:,} tokens"
    if session.workers is not None:
        return f"{len(session.workers.workers)} workers on each host, the largest with {rows}"
    if session.continuous_batching is not None:
        return f"slots of {rows} on each host"
    hosts = topology.num_hosts(session.engine.mesh)
    return f"one batch of {rows} on each host" if hosts == 1 else f"one batch of all {hosts} hosts, {rows} on each"


def _worker_placements(session: Session) -> tuple[WorkerPlacement, ...]:
    if session.workers is None:
        return ()
    places = []
    for worker in session.workers.workers:
        footprint = worker.engine.footprint()
        mesh = jax.tree.leaves(footprint.slots)[0].sharding.mesh
        places.append(
            WorkerPlacement(
                name=worker.name,
                devices=tuple(device.id for device in mesh.devices.flat),
                mesh=dict(mesh.shape),
                slots=worker.engine.shapes.num_slots,
                cache_bytes=bytes_per_device((footprint.slots, footprint.prompts)),
            )
        )
    return tuple(places)
