"""The compiler's memory figures for the programs of a step, from abstract compiles: no weights, no samples."""

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
from app.batching.token_batch import pack_tokens
from app.mesh.placement import abstract_arrays, row_sharding
from app.mesh.topology import num_hosts
from app.preflight.activation_memory import TEMPORARY_BUFFERS, MemoryBreakdown, largest_micro_batch
from app.preflight.memory import StepShapes
from app.preflight.tables import format_mebibytes, format_table
from app.runtime.session import Session
from app.training.learner import Learner, LearnerGroup
from app.update.loss_aggregation import StepTotals


@dataclass(frozen=True)
class CompiledProgram:
    """Bytes of a program on each device. Arguments and outputs are exact, temporaries depend on the compiler."""

    phase: str
    name: str
    backend: str
    """Backend of the compiler."""
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Bytes of outputs that are written over arguments."""
    temporary_bytes: int
    estimated_bytes: int | None
    """Temporaries by `memory_by_phase`; None if it has no estimate for this program."""
    compile_s: float


def compile_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, memory: Mapping[str, MemoryBreakdown]
) -> tuple[CompiledProgram, ...]:
    """Compiles the programs of every phase of a step for the devices at hand, real or virtual."""
    programs = []
    for phase, name, lowered, estimated in _lower_programs(session, learning, shapes, memory):
        started = time.perf_counter()
        compiled = lowered.compile()
        analysis: Any = compiled.memory_analysis()
        programs.append(
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
    return tuple(programs)


def _lower_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, memory: Mapping[str, MemoryBreakdown]
) -> Iterator[tuple[str, str, Lowered, int | None]]:
    """Yields phase, name, program and estimated temporaries of each program; lowers one after the other."""
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
        buffers = ("activations",) if name == "prefill" else ("logits", "logits_work")
        yield "rollout", name, lowered, sum(phase_memory.get(buffer, 0) for buffer in ("whole_weights", *buffers))


def _estimated_temporary_bytes(phase_memory: MemoryBreakdown) -> int:
    return sum(phase_memory.get(name, 0) for name in ("micro_batch_gradients", *TEMPORARY_BUFFERS))


def lower_update(session: Session, learner: Learner, plan: MicroBatchPlan) -> dict[str, Lowered]:
    """Returns the programs of an optimizer step: the gradients of its largest micro-batch, and the update."""
    batch = _global_shapes(
        session.mesh, learner.updater.pack((), _empty_micro_batch(plan), StepTotals(num_tokens=0, num_samples=0))
    )
    with jax.set_mesh(session.mesh):
        state = abstract_arrays(learner.shapes, learner.shardings)
        return learner.update_step.lower(state, batch, jnp.float32(1), learner.frozen_shapes)


def _empty_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """Returns a micro-batch without samples whose arrays have the shapes of the largest one."""
    largest = largest_micro_batch(plan)
    return MicroBatch(((),) * len(largest.rows), largest.shape)


def _global_shapes(mesh: Mesh, batch: Any) -> Any:
    """Returns the shapes of the rows of all hosts."""
    rows, hosts = row_sharding(mesh), num_hosts(mesh)
    shape_of = lambda x: jax.ShapeDtypeStruct((x.shape[0] * hosts, *x.shape[1:]), x.dtype, sharding=rows)  # noqa: E731
    return jax.tree.map(shape_of, batch)


def format_programs_table(programs: Sequence[CompiledProgram]) -> list[str]:
    """Returns a line for each program, in MiB."""
    head = ("MiB on each device", "arguments", "outputs", "in place", "temporaries", "estimated", "compiled in")
    rows = []
    for one in programs:
        sizes = (one.argument_bytes, one.output_bytes, one.aliased_bytes, one.temporary_bytes, one.estimated_bytes)
        rows.append((f"{one.phase}: {one.name}", *map(format_mebibytes, sizes), f"{one.compile_s:.1f} s"))
    backend = programs[0].backend
    copies = " (this one multiplies bfloat16 as float32 copies)" if backend == "cpu" else ""
    return [
        *format_table(head, rows),
        f"Arguments and outputs are exact. Temporaries are those of the compiler of backend {backend}; "
        f"another backend's differ{copies}.",
    ]
