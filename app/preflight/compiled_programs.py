"""Memory sizes of a step's programs as reported by the compiler, without loading weights or samples."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan
from app.batching.token_batch import pack_tokens
from app.mesh.compile_only import kernel_schedules
from app.mesh.device_mesh import num_hosts
from app.mesh.placement import abstract_arrays, num_local_row_shards, row_sharding
from app.mesh.tpu_chips import find_chip
from app.model.prefill_and_decode import DECODE_SCOPE
from app.preflight.hlo_text import HloProgram
from app.preflight.kernel_time import kernel_times, take_scheduled_bundles
from app.preflight.memory import TEMPORARY_BUFFERS, MemoryBreakdown, StepShapes, largest_micro_batch
from app.preflight.program_time import PARTS, program_time
from app.preflight.program_work import ProgramWork, decode_work, longest_samples, packed_pass_work, prefill_work
from app.records.atomic_write import write_atomic
from app.records.text_format import format_bytes, format_percent, format_table
from app.rollout.slot_programs import INSERT_SCOPE
from app.runtime.session import Session
from app.training.learner import Learner, LearnerGroup
from app.update.loss_aggregation import StepTotals
from settings.errors import InputError
from settings.schema.score import ScoredRole


@dataclass(frozen=True)
class CompiledProgram:
    """A program as its compiler sees it, on each device. Arguments and outputs are exact.

    Times are the TPU compiler's estimates for one call with the fullest rows, and of one token for `decode`; None for
    other compilers.
    """

    phase: str
    name: str
    backend: str
    """Platform for which the program was compiled."""
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Bytes of outputs that overwrite arguments."""
    temporary_bytes: int
    estimated_bytes: int | None
    """Temporaries as estimated by `memory_by_phase`; None for the optimizer's program, which has no estimate."""
    compute_s: float | None
    kernel_s: float | None
    exposed_collective_s: float | None
    """Seconds of collectives that no other work covers."""
    estimated_s: float | None
    """The sum of the three."""
    parts_s: Mapping[str, float] | None
    """The same seconds by part of the network; see `app.preflight.program_time.PARTS`."""
    model_flops: int | None
    mfu: float | None
    """The model's FLOPs in the estimated time, relative to the chip's peak."""
    collective_bytes: Mapping[str, int] | None
    """Bytes that each device sends, by kind of collective."""
    compile_s: float


def compile_programs(
    session: Session,
    learning: LearnerGroup,
    shapes: StepShapes,
    memory: Mapping[str, MemoryBreakdown],
    *,
    hlo: Path | None = None,
) -> tuple[CompiledProgram, ...]:
    """Compiles the programs of every phase of a step for the devices of the mesh, which need not be there.

    Args:
        hlo: folder for the texts of the programs.

    Raises:
        InputError: a program does not fit.
    """
    device = session.mesh.devices.flat[0]
    chip = find_chip(device.device_kind) if device.platform == "tpu" else None
    programs, bundles, schedules = [], {}, kernel_schedules()
    for phase, name, lowered, work in _lower_programs(session, learning, shapes):
        started = time.perf_counter()
        compiled = _compile(lowered, f"{phase}: {name}")
        analysis: Any = compiled.memory_analysis()
        took = time.perf_counter() - started
        buffers = ("micro_batch_gradients", *TEMPORARY_BUFFERS)
        if phase == "rollout":
            buffers = ("whole_weights", *(("activations",) if name == "prefill" else ("logits", "logits_work")))
        text = compiled.as_text() or ""
        if hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            write_atomic(hlo / f"{phase}_{name}.hlo", text.encode())
        if schedules is not None:
            bundles |= take_scheduled_bundles(schedules)
        estimate = None
        if chip is not None:
            program = HloProgram(text)
            kernels = dict(kernel_times(program, chip, bundles, work.turns))
            turn_of = DECODE_SCOPE if name == "decode" else None
            estimate = program_time(program, chip, kernel_s=kernels, loop_counts=work.turns, turn_of=turn_of)
        programs.append(
            CompiledProgram(
                phase=phase,
                name=name,
                backend=device.platform,
                argument_bytes=analysis.argument_size_in_bytes,
                output_bytes=analysis.output_size_in_bytes,
                aliased_bytes=analysis.alias_size_in_bytes,
                temporary_bytes=analysis.temp_size_in_bytes,
                estimated_bytes=None if name == "optimizer" else sum(memory[phase].get(one, 0) for one in buffers),
                compute_s=estimate and estimate.compute_s,
                kernel_s=estimate and estimate.kernel_s,
                exposed_collective_s=estimate and estimate.exposed_collective_s,
                estimated_s=estimate and estimate.estimated_s,
                parts_s=estimate and {part: estimate.parts[part] for part in PARTS},
                model_flops=work.model_flops or None,
                mfu=(work.model_flops / estimate.estimated_s / chip.flops)
                if estimate and chip and work.model_flops
                else None,
                collective_bytes=estimate and dict(estimate.collective_bytes),
                compile_s=took,
            )
        )
    return tuple(programs)


def _compile(lowered: Lowered, name: str) -> Compiled:
    """Compiles a program; raises InputError with the compiler's figures if it does not fit."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        lines = [line.strip() for line in str(error).splitlines()]
        largest = ", ".join(line.partition(": ")[2] for line in lines if re.match(r"(\d+\. )?Size: ", line))
        raise InputError(
            f"{name} does not fit: {lines[0].removeprefix('RESOURCE_EXHAUSTED: ')}"
            f"{f' Its largest buffers: {largest}.' if largest else ''} Lower algorithm.max_tokens_per_device, "
            "rollout.prompts_per_step or rollout.max_new_tokens, set model.remat: block, or use more devices"
        ) from None


def _lower_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes
) -> Iterator[tuple[str, str, Lowered, ProgramWork]]:
    """Yields (phase, name, lowered program, its work) for each program of a step, with the longest samples."""
    yield from (("rollout", *program) for program in _lower_generation(session, shapes))
    settings = session.settings
    samples = longest_samples(
        settings.rollout.prompts_per_step // settings.num_mini_batches * settings.rollout.group_size,
        prompt=settings.data.max_prompt_length,
        completion=settings.rollout.max_new_tokens,
    )

    def work_of(role: ScoredRole, plan: MicroBatchPlan, *, has_gradients: bool) -> ProgramWork:
        return packed_pass_work(
            session.architecture_of(role),
            session.mesh,
            samples,
            largest_micro_batch(plan),
            logits_chunk=None if role == "critic" else settings.model.logits_chunk,
            has_gradients=has_gradients,
        )

    for role, plan in shapes.scores.items():
        definition, scorer = session.model_spec.policy_definition, session.scorer
        if role == "reference":
            definition, scorer = session.model_spec.reference_definition, session.reference_scorer
        if role == "critic":
            assert session.critic is not None
            definition, scorer = session.critic.spec.definition, session.critic.valuer
        params = abstract_arrays(definition.shapes, definition.shardings(session.mesh))
        batch = _global_shapes(session.mesh, pack_tokens((), _empty_micro_batch(plan)))
        yield "score", role, scorer.lower(params, batch), work_of(role, plan, has_gradients=False)
    learners: Mapping[str, tuple[ScoredRole, Learner | None, MicroBatchPlan | None]] = {
        "critic": ("critic", learning.critic, shapes.critic_update),
        "update": ("policy", learning.policy, shapes.update),
    }
    for phase, (role, learner, plan) in learners.items():
        if learner is not None and plan is not None:
            lowered = lower_update(session, learner, plan)
            yield phase, "gradients", lowered["gradients"], work_of(role, plan, has_gradients=True)
            yield phase, "optimizer", lowered["optimizer"], ProgramWork(0, {})


def _lower_generation(session: Session, shapes: StepShapes) -> Iterator[tuple[str, Lowered, ProgramWork]]:
    """Yields (name, lowered program, its work) for prefill and decode with the longest samples."""
    truncates, architecture = session.sampling_params.truncates, session.model_spec.architecture
    engine = None if session.continuous_batching is None else session.continuous_batching.engine
    if session.workers is not None:
        engine = max((worker.engine for worker in session.workers.workers), key=lambda e: e.shapes.num_slots)
    if engine is not None:
        mesh, programs = engine.programs.mesh, engine.programs.lower_programs(truncates=truncates)
        num_prompts, prompt_length = engine.shapes.prefill_rows[-1], engine.shapes.max_prompt_length
        num_rows, cache_length = engine.shapes.num_slots, engine.shapes.max_length
    else:
        shape = shapes.rollout
        assert shape is not None
        mesh, programs = session.engine.mesh, session.engine.lower_programs(shape, truncates=truncates)
        num_prompts, prompt_length = shape.num_prompts, shape.prompt_length
        num_rows, cache_length = shape.num_rows, shape.cache_length
    parts = num_local_row_shards(mesh)
    sizes = {"num_prompts": -(-num_prompts // parts), "prompt_length": prompt_length}
    work = prefill_work(architecture, mesh, **sizes)
    yield "prefill", programs["prefill"], replace(work, turns={**work.turns, INSERT_SCOPE: num_prompts})
    sizes = {"num_rows": -(-num_rows // parts), "cache_length": cache_length}
    yield "decode", programs["decode"], decode_work(architecture, mesh, **sizes)


def lower_update(session: Session, learner: Learner, plan: MicroBatchPlan) -> dict[str, Lowered]:
    """Returns the programs of an optimizer step: the gradients of its largest micro-batch, and the update."""
    empty = learner.updater.pack((), _empty_micro_batch(plan), StepTotals(num_tokens=0, num_samples=0))
    batch = _global_shapes(session.mesh, empty)
    with jax.set_mesh(session.mesh):
        state = abstract_arrays(learner.shapes, learner.shardings)
        # Arrays cannot be made on devices that are not there.
        temperature: Any = jax.ShapeDtypeStruct((), np.float32)
        return learner.update_step.lower(state, batch, temperature, learner.frozen_shapes)


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
    """Returns a table of each program's memory and, for TPUs, one of its time."""
    head = ("on each device", "arguments", "outputs", "aliased", "temporaries", "estimated", "compiled in")
    rows = []
    for one in programs:
        sizes = (one.argument_bytes, one.output_bytes, one.aliased_bytes, one.temporary_bytes, one.estimated_bytes)
        cells = ("-" if size is None else format_bytes(size) for size in sizes)
        rows.append((f"{one.phase}: {one.name}", *cells, f"{one.compile_s:.1f} s"))
    backend = programs[0].backend
    note = ", which multiplies bfloat16 as float32 copies" if backend == "cpu" else ""
    lines = [
        format_table(rows, header=head),
        f"Arguments and outputs are exact. Temporaries are those reported by the compiler for {backend}{note}.",
    ]
    times = [
        (
            f"{one.phase}: {one.name}",
            *(
                f"{seconds * 1e3:.2f} ms"
                for seconds in (one.estimated_s, *(one.parts_s.get(part, 0) for part in PARTS))
            ),
            "-" if one.mfu is None else format_percent(one.mfu),
        )
        for one in programs
        if one.estimated_s is not None and one.parts_s is not None
    ]
    if times:
        head = ("of one call, estimated by the compiler", "time", *PARTS, "MFU")
        lines += ["", format_table(times, header=head)]
        lines.append("A call of decode is one token of all rows. Collectives count where no other work covers them.")
    return "\n".join(lines)
