"""Memory sizes of a step's programs as reported by the compiler, without loading weights or samples."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan
from app.batching.token_batch import pack_tokens
from app.mesh.device_mesh import num_hosts
from app.mesh.placement import abstract_arrays, row_sharding
from app.preflight.memory import TEMPORARY_BUFFERS, MemoryBreakdown, StepShapes, largest_micro_batch
from app.records.text_format import format_bytes, format_table
from app.runtime.session import Session
from app.training.learner import Learner, LearnerGroup
from app.update.loss_aggregation import StepTotals


@dataclass(frozen=True)
class CompiledProgram:
    """Bytes of a program on each device. Arguments and outputs are exact; temporaries depend on the compiler."""

    phase: str
    name: str
    backend: str
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Bytes of outputs that overwrite arguments."""
    temporary_bytes: int
    estimated_bytes: int | None
    """Temporaries as estimated by `memory_by_phase`; None for the optimizer's program, which has no estimate."""
    compile_s: float


def compile_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, memory: Mapping[str, MemoryBreakdown]
) -> tuple[CompiledProgram, ...]:
    """Compiles the programs of every phase of a step for the available devices, real or virtual."""
    programs = []
    for phase, name, lowered in _lower_programs(session, learning, shapes):
        started = time.perf_counter()
        compiled = lowered.compile()
        analysis: Any = compiled.memory_analysis()
        import os
        if os.environ.get("HLO"):
            open(f"{os.environ['HLO']}/{phase}_{name}.hlo", "w").write(compiled.as_text())
        buffers = ("micro_batch_gradients", *TEMPORARY_BUFFERS)
        if phase == "rollout":
            buffers = ("whole_weights", *(("activations",) if name == "prefill" else ("logits", "logits_work")))
        programs.append(
            CompiledProgram(
                phase=phase,
                name=name,
                backend=jax.default_backend(),
                argument_bytes=analysis.argument_size_in_bytes,
                output_bytes=analysis.output_size_in_bytes,
                aliased_bytes=analysis.alias_size_in_bytes,
                temporary_bytes=analysis.temp_size_in_bytes,
                estimated_bytes=None if name == "optimizer" else sum(memory[phase].get(one, 0) for one in buffers),
                compile_s=time.perf_counter() - started,
            )
        )
    return tuple(programs)


def _lower_programs(session: Session, learning: LearnerGroup, shapes: StepShapes) -> Iterator[tuple[str, str, Lowered]]:
    """Yields (phase, name, lowered program) for each program of a step."""
    truncates = session.sampling_params.truncates
    if session.workers is not None:
        largest = max((worker.engine for worker in session.workers.workers), key=lambda e: e.shapes.num_slots)
        programs = largest.programs.lower_programs(truncates=truncates)
    elif session.continuous_batching is not None:
        programs = session.continuous_batching.engine.programs.lower_programs(truncates=truncates)
    else:
        assert shapes.rollout is not None
        programs = session.engine.lower_programs(shapes.rollout, truncates=truncates)
    yield from (("rollout", name, lowered) for name, lowered in programs.items())
    for role, plan in shapes.scores.items():
        definition, scorer = session.model_spec.policy_definition, session.scorer
        if role == "reference":
            definition, scorer = session.model_spec.reference_definition, session.reference_scorer
        if role == "critic":
            assert session.critic is not None
            definition, scorer = session.critic.spec.definition, session.critic.valuer
        params = abstract_arrays(definition.shapes, definition.shardings(session.mesh))
        batch = _global_shapes(session.mesh, pack_tokens((), _empty_micro_batch(plan)))
        yield "score", role, scorer.lower(params, batch)
    learners = {"critic": (learning.critic, shapes.critic_update), "update": (learning.policy, shapes.update)}
    for phase, (learner, plan) in learners.items():
        if learner is not None and plan is not None:
            yield from ((phase, name, lowered) for name, lowered in lower_update(session, learner, plan).items())


def lower_update(session: Session, learner: Learner, plan: MicroBatchPlan) -> dict[str, Lowered]:
    """Returns the programs of an optimizer step: the gradients of its largest micro-batch, and the update."""
    empty = learner.updater.pack((), _empty_micro_batch(plan), StepTotals(num_tokens=0, num_samples=0))
    batch = _global_shapes(session.mesh, empty)
    with jax.set_mesh(session.mesh):
        state = abstract_arrays(learner.shapes, learner.shardings)
        return learner.update_step.lower(state, batch, np.float32(1), learner.frozen_shapes)


def _empty_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """Returns a micro-batch without samples whose arrays have the shapes of the largest one."""
    largest = largest_micro_batch(plan)
    return MicroBatch(((),) * len(largest.rows), largest.shape)


def _global_shapes(mesh: Mesh, batch: Any) -> Any:
    """Returns the shapes of a batch with the rows of all hosts."""
    rows, hosts = row_sharding(mesh), num_hosts(mesh)
    shape_of = lambda x: jax.ShapeDtypeStruct((x.shape[0] * hosts, *x.shape[1:]), x.dtype, sharding=rows)  # noqa: E731
    return jax.tree.map(shape_of, batch)


def format_programs_table(programs: Sequence[CompiledProgram]) -> str:
    """Returns a table with one line per program."""
    head = ("on each device", "arguments", "outputs", "aliased", "temporaries", "estimated", "compiled in")
    rows = []
    for one in programs:
        sizes = (one.argument_bytes, one.output_bytes, one.aliased_bytes, one.temporary_bytes, one.estimated_bytes)
        cells = ("-" if size is None else format_bytes(size) for size in sizes)
        rows.append((f"{one.phase}: {one.name}", *cells, f"{one.compile_s:.1f} s"))
    backend = programs[0].backend
    note = ", which multiplies bfloat16 as float32 copies" if backend == "cpu" else ""
    return (
        f"{format_table(rows, header=head)}\n"
        f"Arguments and outputs are exact. Temporaries are those reported by the compiler for {backend}{note}."
    )
