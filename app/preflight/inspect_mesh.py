"""`grpo inspect-mesh`: the layout on the mesh, the memory of each phase, and what fits. Loads no weights."""

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
from app.preflight.memory import StepShapes, compute_step_shapes, format_memory_table, memory_by_phase, peak_phase
from app.preflight.mesh_layout import MeshReport, format_id_ranges, mesh_report
from app.preflight.tables import format_mebibytes, format_table
from app.records.sample import Prompt
from app.runtime.batch_checks import check_fixed_micro_batches, check_host_offload
from app.runtime.session import Session
from app.training.learner import make_learner_group
from app.training.setup import setup_notes
from settings import Resolved


@dataclass(frozen=True)
class WorkerPlacement:
    """One worker of `rollout.workers`; every host has the same ones on its own devices."""

    name: str
    devices: tuple[int, ...]
    """Ids of its devices on this host."""
    mesh: Mapping[str, int]
    slots: int
    cache_bytes: int
    """Bytes of its slots and of its prompt cache on each of its devices."""


@dataclass(frozen=True)
class MeshInspection:
    """Layout and memory, in bytes on each device, at the longest prompts and completions that the settings allow."""

    mesh: MeshReport
    generation: str
    """Description of how rows are generated."""
    workers: tuple[WorkerPlacement, ...]
    memory: Mapping[str, MemoryBreakdown]
    """Memory by phase; lines that `app.preflight.memory.MEMORY_LABELS` stars are estimates."""
    peak_bytes: int
    largest: tuple[BatchLimit, ...]
    """Largest batches that fit; empty if the memory of a device is not known."""
    notes: tuple[str, ...] = ()
    """Notes on the mesh that a run would print."""
    programs: tuple[CompiledProgram, ...] = ()
    """Compiled programs; empty without `--compile`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report for JSON."""
        rest = asdict(self)
        del rest["mesh"]
        return {**self.mesh.to_dict(), **rest, "peak_phase": peak_phase(self.memory)}

    def to_text(self) -> str:
        """Returns the report for a person."""
        lines = [self.mesh.to_text(), *self.notes, "", f"rollout: {self.generation}"]
        if self.workers:
            head = ("worker", "devices", "dp, fsdp, tp", "slots", "MiB of caches a device")
            rows = [
                (
                    *(one.name, format_id_ranges(one.devices), ", ".join(map(str, one.mesh.values()))),
                    *(str(one.slots), format_mebibytes(one.cache_bytes)),
                )
                for one in self.workers
            ]
            lines += format_table(head, rows, right_from=3)
        lines += ["", *format_memory_table(self.memory), "", self._memory_summary()]
        lines += [f"  {one.to_text()}" for one in self.largest]
        if self.programs:
            lines += ["", *format_programs_table(self.programs)]
        return "\n".join(lines)

    def _memory_summary(self) -> str:
        available = self.mesh.topology.memory_bytes
        peak = f"{peak_phase(self.memory)} needs most, {self.peak_bytes / 2**30:.2f} GiB on each device"
        if available is None:
            return f"{peak}; the memory of a device is not known"
        share = self.peak_bytes / available
        if share > 1:
            return f"{peak}, {share:.0%} of its memory; this does not fit:"
        return f"{peak}, {share:.0%} of its memory; largest values under {USABLE_MEMORY_FRACTION:.0%}, one at a time:"


def inspect_mesh(resolved: Resolved, *, compiles: bool) -> MeshInspection:
    """Returns the layout of weights, rows and workers under these settings, and the memory of each phase.

    Args:
        compiles: also compiles the programs of every phase for the devices at hand.

    Raises:
        InputError: settings or a configuration that cannot be used, or rows that do not divide evenly.
    """
    settings = resolved.settings
    spec = read_config_only_spec(settings)
    topology.initialize_distributed(settings.mesh)
    check_hosts_agree(resolved)
    session = Session.open(settings, spec.model, spec.critic)
    check_fixed_micro_batches(settings, session)
    if settings.offloads_reference:
        check_host_offload(session.mesh)
    # Keeps the hosts together until the end: one that exits early makes JAX time out on the others.
    with error_barrier():
        return build_mesh_inspection(session, spec, compiles=compiles)


def build_mesh_inspection(session: Session, spec: ConfigOnlySpec, *, compiles: bool) -> MeshInspection:
    """Returns the report of a session whose networks are not loaded."""
    settings, memory_bytes = session.settings, device_memory_bytes()
    rollout, num_hosts = settings.rollout, topology.num_hosts(session.mesh)
    learning = make_learner_group(settings, session)
    prompt = make_longest_prompt(settings.data.max_prompt_length)
    # The number of held-out prompts is not known without the data: assume full batches on all hosts.
    num_held_out = settings.eval.num_prompts or rollout.prompts_per_step * rollout.group_size * num_hosts
    held_out = [prompt] * num_held_out if settings.eval.every_steps else []
    shapes = compute_step_shapes(session, learning, [prompt], held_out, spec.reward_model)
    memory = memory_by_phase(session, learning, shapes, spec.reward_model)
    definition = spec.model.policy_definition
    weights, dims = flatten_by_path(definition.shapes), flatten_by_path(definition.dims)
    return MeshInspection(
        mesh=mesh_report(
            session.mesh,
            {".".join(path): (weights[path], dims[path]) for path in weights},
            num_parameters=definition.num_parameters,
            samples_per_step=rollout.prompts_per_step * rollout.group_size * num_hosts,
            memory_bytes=memory_bytes,
        ),
        generation=_describe_generation(session, shapes),
        workers=_worker_placements(session),
        memory=memory,
        peak_bytes=sum(memory[peak_phase(memory)].values()),
        largest=tuple(find_batch_limits(session, shapes, memory, available_bytes=memory_bytes)) if memory_bytes else (),
        notes=setup_notes(settings, session),
        programs=compile_programs(session, learning, shapes, memory) if compiles else (),
    )


def make_longest_prompt(num_tokens: int) -> Prompt:
    """Returns a prompt as long as `data.max_prompt_length` allows."""
    return Prompt("longest", np.zeros(num_tokens, np.int32), "", None)


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
    placements = []
    for worker in session.workers.workers if session.workers is not None else ():
        footprint = worker.engine.footprint()
        mesh = jax.tree.leaves(footprint.slots)[0].sharding.mesh
        placements.append(
            WorkerPlacement(
                name=worker.name,
                devices=tuple(device.id for device in mesh.devices.flat),
                mesh=dict(mesh.shape),
                slots=worker.engine.shapes.num_slots,
                cache_bytes=bytes_per_device((footprint.slots, footprint.prompts)),
            )
        )
    return tuple(placements)
