"""`grpo inspect-mesh`: reports the placement of weights and rows and the memory of each phase, without weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.checkpoint.saved_arrays import array_path
from app.distributed.collectives import error_barrier
from app.distributed.host_consistency import check_hosts_agree
from app.mesh import jax_startup
from app.mesh.axis_rules import partition_spec
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import (
    device_kind,
    device_memory_bytes,
    device_platform,
    host_index,
    local_devices,
    simulated_slice,
)
from app.mesh.placement import bytes_per_device, num_row_shards
from app.model.decode_weights import transferred_bytes
from app.model.decoder import flatten_by_path
from app.model.io.families import SEQUENCE_CLASSIFICATION
from app.preflight.compiled_programs import CompiledProgram, ProgramCallback, format_step_memory, step_memory
from app.preflight.phase_memory import StepOutline, outline_step, peak_phase
from app.records.atomic_write import write_atomic
from app.records.sample import Prompt
from app.records.text_format import format_bytes, format_ranges, format_table
from app.runtime.inputs import read_critic, read_policy, read_teacher
from app.runtime.model_spec import ModelSpec, NetworkSpec, model_setting_in_errors, open_value_network
from app.runtime.scoring import ScoringSession
from app.runtime.session import Session
from app.training.learner import LearnerGroup
from app.training.network_memory import MemoryBreakdown, host_bytes
from app.training.setup import open_session, setup_notes
from settings import Resolved, Settings

MAX_HOSTS_SHOWN = 4
"""Maximum number of hosts in the text, which otherwise shows only the first two and the last."""


@dataclass(frozen=True)
class HostParts:
    """The devices of one host, and the index of the shard of rows and weights that each of them holds."""

    host: int
    devices: tuple[int, ...]
    rows: tuple[int, ...]
    """Index of each device's shard of the rows, which are sharded over dp and fsdp."""
    fsdp: tuple[int, ...]
    tp: tuple[int, ...]
    """Index of each device's shard of the weights along tp."""


@dataclass(frozen=True)
class WeightPlacement:
    """Name, shape and placement of one parameter on the mesh."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    """Mesh axes over which each dim is sharded, such as `dp+fsdp`; None for a replicated dim."""
    bytes_per_device: int


@dataclass(frozen=True)
class SavedArray:
    """Name and size of an array in a checkpoint."""

    name: str
    bytes: int


@dataclass(frozen=True)
class MeshInspection:
    """Layout and memory of a run, for the longest prompts and completions that its settings allow."""

    platform: str
    device_kind: str
    pretended: str | None
    """Name of the TPU slice or GPU host that virtual devices simulate; None for real devices."""
    num_devices: int
    num_hosts: int
    this_host: int
    device_memory_bytes: int | None
    shape: Mapping[str, int]
    hosts: Sequence[HostParts]
    weights: Sequence[WeightPlacement]
    num_parameters: int
    weight_bytes_per_device: int
    samples_per_step: int
    samples_per_device: float
    generation: str
    transferred_bytes: int
    """Bytes that each device receives when trained weights are converted for generation, once per policy version."""
    memory: Mapping[str, MemoryBreakdown]
    """Bytes of each buffer on a device, for each phase; with `--compile`, also the temporaries of programs."""
    peak_bytes: int
    peak_phase: str
    host_bytes: int
    """Bytes per device that `optimizer.offload` and `score.reference.offload` keep in host memory."""
    largest_saved_array: SavedArray | None
    """Largest array of a checkpoint, which every host must hold whole at a resume if hosts share no folder; None on one
    host."""
    notes: tuple[str, ...]
    programs: tuple[CompiledProgram, ...]
    """Compiled programs; empty without `--compile`."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict that can be written as JSON."""
        return asdict(self)

    def to_text(self) -> str:
        size = self.device_memory_bytes
        memory = "memory unknown" if size is None else f"{format_bytes(size)} each"
        simulated = "" if self.pretended is None else f" of a simulated {self.pretended}"
        weights = [
            (w.name, str(w.shape), ", ".join(axis or "-" for axis in w.axes), format_bytes(w.bytes_per_device))
            for w in self.weights
        ]
        lines = [
            f"{self.num_devices} x {self.device_kind} ({self.platform}), {memory}, on {self.num_hosts} host(s)",
            f"host {self.this_host}{simulated}: devices {format_ranges(self.hosts[self.this_host].devices)}",
            f"\nmesh {' x '.join(f'{axis} {size}' for axis, size in self.shape.items())}\n{self._host_table()}\n",
            format_table(weights, header=("weight", "shape", "axes", "on each device"), num_left=3),
            f"\n{self.num_parameters:,} parameters, {format_bytes(self.weight_bytes_per_device)} on each device",
            f"{self.samples_per_step} samples per step, {self.samples_per_device:g} per device",
            *self.notes,
            f"\nrollout: {self.generation}",
            f"weights to the rollout's layout: {format_bytes(self.transferred_bytes)} per device for each policy "
            "version",
        ]
        if self.host_bytes:
            lines.append(f"host memory: {format_bytes(self.host_bytes)} per device")
        if (array := self.largest_saved_array) is not None:
            lines.append(
                "checkpoints, if hosts share no folder: one array at a time in the memory of every host at a resume; "
                f"the largest is {array.name}, {format_bytes(array.bytes)}"
            )
        return "\n".join([*lines, "", format_step_memory(self.memory, self.programs, available_bytes=size)])

    def _host_table(self) -> str:
        header = ["host", "devices", f"parts of rows (of {self.shape['dp'] * self.shape['fsdp']})"]
        header += [f"parts of weights along {axis} (of {self.shape[axis]})" for axis in ("fsdp", "tp")]
        rows = [[str(one.host), *map(format_ranges, (one.devices, one.rows, one.fsdp, one.tp))] for one in self.hosts]
        if len(rows) > MAX_HOSTS_SHOWN:
            rows = [*rows[:2], ["..."] * len(header), rows[-1]]
        return format_table(rows, header=header, num_left=len(header))


class ConfigOnlySpec(NamedTuple):
    """A run's networks, described only by their `config.json`."""

    model: ModelSpec
    critic: NetworkSpec | None
    reward_model: NetworkSpec | None
    teacher: NetworkSpec | None


def read_config_only_spec(settings: Settings) -> ConfigOnlySpec:
    """Reads the `config.json` of each network; no other file is downloaded from the hub.

    Raises:
        InputError: a `config.json` cannot be found or used, or a model's context is shorter than the longest sample.
    """
    model, reward_model = read_policy(settings, config_only=True), None
    if (path := settings.reward.model) is not None:
        with model_setting_in_errors("reward.model"):
            reward_model = open_value_network(path, settings, heads=SEQUENCE_CLASSIFICATION, config_only=True)
    critic, teacher = (read(settings, model, config_only=True) for read in (read_critic, read_teacher))
    return ConfigOnlySpec(model, critic, reward_model, teacher)


def open_step_outline(resolved: Resolved, *, compiles: bool) -> StepOutline:
    """Joins the other hosts and outlines a step, reading only the settings and each model's `config.json`.

    Prompts and completions are the longest that the settings allow. Set `compiles` if programs will be compiled.

    Raises:
        InputError: the settings or a configuration cannot be used, or rows do not divide evenly over the devices.
    """
    settings = resolved.settings
    spec = read_config_only_spec(settings)
    jax_startup.initialize_distributed(settings.mesh, compiles=compiles)
    check_hosts_agree(resolved)
    scoring = ScoringSession.open(settings, spec.model, spec.critic, spec.teacher, trains=True)
    session, learning = open_session(scoring, spec.reward_model)
    prompt = make_longest_prompt(settings.data.max_prompt_length)
    # Without the data, the number of held-out prompts is unknown: assumes full batches on all hosts.
    num_held_out = settings.eval.num_prompts or num_samples_per_step(session)
    held_out = [prompt] * num_held_out if settings.eval.every_steps else []
    return outline_step(session, learning, [prompt], held_out, spec.reward_model)


def inspect_mesh(resolved: Resolved, *, compiles: bool, hlo: Path | None = None) -> MeshInspection:
    """Returns the layout of weights, rows and workers under these settings, and the memory of each phase.

    Args:
        compiles: whether to compile the programs of every phase for the devices of the mesh.
        hlo: folder to which the HLO text of each compiled program is written; None writes none.

    Raises:
        InputError: the settings or a `config.json` cannot be used, or a program does not fit in device memory.
    """
    step = open_step_outline(resolved, compiles=compiles)
    # Keeps the hosts together until the end: if one exits early, JAX times out on the others.
    with error_barrier():
        on_program = None if hlo is None else partial(write_program, hlo)
        return build_mesh_inspection(step, compiles=compiles, on_program=on_program)


def write_program(folder: Path, program: CompiledProgram, text: str) -> None:
    """Writes the HLO text of a compiled program to `PHASE_NAME.hlo` in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / f"{program.phase}_{program.name}.hlo", text.encode())


def build_mesh_inspection(
    step: StepOutline, *, compiles: bool, on_program: ProgramCallback | None = None
) -> MeshInspection:
    """Returns the layout and memory of a run whose step has been outlined."""
    session = step.session
    memory, programs = step_memory(step, compiles=compiles, on_program=on_program)
    definition, conversion, mesh = session.model_spec.policy_definition, session.to_decode_weights, session.mesh
    pretended, device, phase = simulated_slice(), mesh.devices.flat[0], peak_phase(memory)
    weights, dims = flatten_by_path(definition.shapes), flatten_by_path(definition.dims)
    placements = [weight_placement(".".join(path), weights[path], dims[path], mesh) for path in weights]
    return MeshInspection(
        platform=device_platform(device),
        device_kind=device_kind(device),
        pretended=pretended and pretended.name,
        num_devices=mesh.size,
        num_hosts=num_hosts(mesh),
        this_host=host_index(local_devices()[0]),
        device_memory_bytes=device_memory_bytes(),
        shape=dict(mesh.shape),
        hosts=host_parts(mesh),
        weights=placements,
        num_parameters=definition.num_parameters,
        weight_bytes_per_device=sum(one.bytes_per_device for one in placements),
        samples_per_step=num_samples_per_step(session),
        samples_per_device=num_samples_per_step(session) / num_row_shards(mesh),
        generation=_describe_generation(step),
        transferred_bytes=transferred_bytes(
            conversion.definition, mesh, conversion.mesh_of_all_hosts, jnp.dtype(session.settings.model.dtype)
        ),
        memory=memory,
        peak_bytes=sum(memory[phase].values()),
        peak_phase=phase,
        host_bytes=host_bytes(session.scoring, step.learning),
        largest_saved_array=largest_saved_array(step.learning) if num_hosts(mesh) > 1 else None,
        notes=setup_notes(session.settings, session),
        programs=programs,
    )


def largest_saved_array(learning: LearnerGroup) -> SavedArray:
    """Returns the largest array in a checkpoint, or the first of several equally large ones."""
    arrays = jax.tree.leaves_with_path(learning.layout)
    return max((SavedArray(array_path(keys), x.size * x.dtype.itemsize) for keys, x in arrays), key=lambda x: x.bytes)


def host_parts(mesh: Mesh) -> list[HostParts]:
    """Returns the devices of each host and the shards that they hold, ordered by host."""
    found: dict[int, list[tuple[int, ...]]] = {}
    for (dp, fsdp, tp), device in np.ndenumerate(mesh.devices):
        numbers = (device.id, dp * mesh.shape["fsdp"] + fsdp, fsdp, tp)
        found.setdefault(host_index(device), []).append(numbers)
    return [HostParts(host, *zip(*numbers, strict=True)) for host, numbers in sorted(found.items())]


def weight_placement(name: str, weight: jax.ShapeDtypeStruct, dims: Sequence[str], mesh: Mesh) -> WeightPlacement:
    """Returns the mesh axes of a weight's dims and its bytes on each device."""
    shape, spec = weight.shape, partition_spec(dims, weight.shape, mesh)
    axes = tuple("+".join(axis) if isinstance(axis, tuple) else axis for axis in spec)
    size = bytes_per_device(jax.ShapeDtypeStruct(shape, weight.dtype, sharding=NamedSharding(mesh, spec)))
    return WeightPlacement(name, shape, axes, size)


def num_samples_per_step(session: Session) -> int:
    """Returns the number of samples in a step over all hosts."""
    rollout = session.settings.rollout
    return rollout.prompts_per_step * rollout.group_size * num_hosts(session.mesh)


def make_longest_prompt(num_tokens: int) -> Prompt:
    """Returns a prompt of `num_tokens` tokens, all with id 0."""
    return Prompt("longest", np.zeros(num_tokens, np.int32), "", None)


def _describe_generation(step: StepOutline) -> str:
    if (shape := step.rollout or step.evaluation) is None:
        return "nothing is generated"
    rows = f"{shape.num_rows:,} rows with a cache of {shape.cache_length:,} tokens"
    if step.session.workers is not None:
        return f"{len(step.session.workers.workers)} workers on each host, the largest with {rows}"
    return f"{rows.replace('rows', 'slots', 1)} on each host"
