"""What the compiler says of the programs of a step: read from an abstract compile, without weights or samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.stages import Lowered

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan
from app.batching.pack import pack_tokens
from app.mesh.placement import abstract_arrays, row_sharding
from app.mesh.topology import num_hosts
from app.preflight.activation_memory import TEMPORARY_BUFFERS, MemoryBreakdown, largest_micro_batch
from app.preflight.memory import StepShapes
from app.runtime.session import Session
from app.training.learner import Learner, LearnerGroup
from app.update.loss_aggregation import StepTotals


@dataclass(frozen=True)
class CompiledProgram:
    """Bytes on each device. Arguments and outputs are exact; temporaries are what one backend's compiler reserves."""

    phase: str
    name: str
    backend: str
    """Whose compiler it was: another one's temporaries differ."""
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Of the outputs, written over arguments."""
    temporary_bytes: int
    estimated_bytes: int | None
    """Of the temporaries, by the table of `memory_by_phase`; None where the table does not tell this program's."""
    compile_s: float


def compile_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, memory: Mapping[str, MemoryBreakdown]
) -> tuple[CompiledProgram, ...]:
    """Of every phase of a step, for the devices that JAX has here, virtual ones among them."""
    found = []
    for phase, name, lowered, estimated in _lower_programs(session, learning, shapes, memory):
        started = time.perf_counter()
        compiled = lowered.compile()
        analysis: Any = compiled.memory_analysis()
        found.append(
            CompiledProgram(
                phase=phase,
                name=name,
                backend=jax.default_backend(),
                argument_bytes=analysis.argument_size_in_bytes,
                output_bytes=analysis.output_size_in_bytes,
                aliased_bytes=analysis.alias_size_in_bytes,
                temporary_bytes=analysis.temp_size_in_bytes,
                estimated_bytes=estimated,
                compile_s=time.perf_counter() - started,
            )
        )
    return tuple(found)


def _lower_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, memory: Mapping[str, MemoryBreakdown]
) -> Iterator[tuple[str, str, Lowered, int | None]]:
    """Phase, name, program, and the temporaries that its phase's table foresees; lowered one after the other."""
    yield from _lower_rollout(session, shapes, memory["rollout"])
    for role, plan in shapes.scores.items():
        definition, scorer = session.model_spec.policy_definition, session.scorer
        if role == "reference":
            definition, scorer = session.model_spec.reference_definition, session.reference_scorer
        if role == "critic":
            assert session.critic is not None
            definition, scorer = session.critic.spec.definition, session.critic.valuer
        params = abstract_arrays(definition.shapes, definition.shardings(session.mesh))
        batch = _global_shapes(session.mesh, pack_tokens((), _empty_micro_batch(plan)))
        yield "score", role, scorer.lower(params, batch), _estimated_temporary_bytes(memory["score"])
    learners = {"critic": (learning.critic, shapes.critic_update), "update": (learning.policy, shapes.update)}
    for phase, (learner, plan) in learners.items():
        if learner is not None and plan is not None:
            for name, lowered in lower_update(session, learner, plan).items():
                yield phase, name, lowered, _estimated_temporary_bytes(memory[phase]) if name == "gradients" else None


def _lower_rollout(
    session: Session, shapes: StepShapes, phase_memory: MemoryBreakdown
) -> Iterator[tuple[str, str, Lowered, int | None]]:
    truncates = session.sampling_params.truncates
    if session.workers is not None:
        largest = max((worker.engine for worker in session.workers.workers), key=lambda e: e.shapes.num_slots)
        programs = largest.programs.lower_programs(truncates=truncates)
    elif session.continuous_batching is not None:
        programs = session.continuous_batching.engine.programs.lower_programs(truncates=truncates)
    else:
        assert shapes.rollout is not None
        programs = session.engine.lower_programs(shapes.rollout, truncates=truncates)
    for name, lowered in programs.items():
        works_in = ("activations",) if name == "prefill" else ("logits", "logits_work")
        yield "rollout", name, lowered, sum(phase_memory.get(part, 0) for part in ("whole_weights", *works_in))


def _estimated_temporary_bytes(phase_memory: MemoryBreakdown) -> int:
    return sum(phase_memory.get(name, 0) for name in ("micro_batch_gradients", *TEMPORARY_BUFFERS))


def lower_update(session: Session, learner: Learner, plan: MicroBatchPlan) -> dict[str, Lowered]:
    """Those of an optimizer step: the gradients of its fullest micro-batch, and the update."""
    batch = _global_shapes(
        session.mesh, learner.updater.pack((), _empty_micro_batch(plan), StepTotals(num_tokens=0, num_samples=0))
    )
    with jax.set_mesh(session.mesh):
        state = abstract_arrays(learner.shapes, learner.shardings)
        return learner.update_step.lower(state, batch, jnp.float32(1), learner.frozen_shapes)


def _empty_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """The fullest micro-batch, without samples: its arrays have the same shapes."""
    fullest = largest_micro_batch(plan)
    return MicroBatch(((),) * len(fullest.rows), fullest.shape)


def _global_shapes(mesh: Mesh, batch: Any) -> Any:
    """The shapes of all hosts' rows."""
    rows, hosts = row_sharding(mesh), num_hosts(mesh)
    shape_of = lambda x: jax.ShapeDtypeStruct((x.shape[0] * hosts, *x.shape[1:]), x.dtype, sharding=rows)  # noqa: E731
    return jax.tree.map(shape_of, batch)


def format_programs_table(programs: Sequence[CompiledProgram]) -> list[str]:
    """A line for each program, in MiB."""
    head = ("arguments", "outputs", "in place", "temporaries", "foreseen", "compiled in")
    lines = [f"{'MiB on each device':<24}" + "".join(f"{name:>13}" for name in head)]
    for one in programs:
        sizes = (one.argument_bytes, one.output_bytes, one.aliased_bytes, one.temporary_bytes, one.estimated_bytes)
        cells = ["-" if size is None else f"{size / 2**20:,.1f}" for size in sizes]
        name = f"{one.phase}: {one.name}"
        lines.append(f"{name:<24}" + "".join(f"{cell:>13}" for cell in [*cells, f"{one.compile_s:.1f} s"]))
    backend = programs[0].backend
    copies = " (this one multiplies bfloat16 by way of float32 copies)" if backend == "cpu" else ""
    return [
        *lines,
        f"Arguments and outputs are exact. Temporaries are those of the compiler of backend {backend}; "
        f"another backend's differ{copies}.",
    ]
