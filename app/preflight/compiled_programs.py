"""Compiles the programs of a training step, without weights or samples, and reports their memory and collectives."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan
from app.batching.token_batch import pack_tokens
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import compiler_versions, device_memory_bytes
from app.mesh.placement import abstract_arrays, is_in_host_memory, num_local_row_shards, row_sharding
from app.model.decoder import DecoderDefinition
from app.model.prefill_and_decode import DECODE_SCOPE
from app.model.token_logprobs import LM_HEAD_SCOPE
from app.preflight.hlo_text import HloProgram
from app.preflight.phase_memory import (
    MEMORY_ADVICE,
    MEMORY_LABELS,
    StepOutline,
    format_memory_table,
    largest_micro_batch,
    memory_by_phase,
    peak_phase,
)
from app.records.text_format import format_bytes, format_percent, format_table
from app.runtime.scoring import set_compute_dtype
from app.runtime.session import Session, eval_sampling_rules, sampling_rules
from app.score.scorer import PackedForward, Scorer, ValueScorer
from app.training.learner import Learner
from app.training.network_memory import MemoryBreakdown
from app.update.loss_aggregation import StepTotals
from settings.errors import InputError


@dataclass(frozen=True)
class CompiledProgram:
    """Memory and collectives of a compiled program on each device, as the compiler reports them."""

    phase: str
    name: str
    backend: str
    """Platform for which the program was compiled."""
    argument_bytes: int
    output_bytes: int
    aliased_bytes: int
    """Bytes of outputs that reuse the memory of donated arguments."""
    temporary_bytes: int
    padding_bytes: int
    """Bytes by which padding enlarges the arguments: a TPU pads dims to its tile size."""
    collective_bytes: Mapping[str, int] | None
    """Maps kinds of collectives to the bytes that each TPU device sends in one call with the fullest rows, or, if the
    program is `decode`, for one token of all rows. None for other devices."""
    compile_s: float


ProgramCallback = Callable[[CompiledProgram, str], None]
"""Called with each program and its HLO text after compiling it."""


class LoweredProgram(NamedTuple):
    """A lowered, not yet compiled program of a step for the longest samples."""

    phase: str
    name: str
    lowered: Lowered
    turns: Mapping[str, int] = MappingProxyType({})
    """Maps the name scope of the loop over LM head chunks to its number of iterations; empty without this loop."""


def step_memory(
    step: StepOutline, *, compiles: bool, on_program: ProgramCallback | None = None
) -> tuple[dict[str, MemoryBreakdown], tuple[CompiledProgram, ...]]:
    """Returns the bytes of each buffer on a device in each phase of a step, and the compiled programs.

    With `compiles`, programs are compiled for the devices of the mesh, which need not exist, and each phase includes
    the temporaries of its largest program. Otherwise phases have only arrays, and there are no programs.

    Raises:
        InputError: a program does not fit.
    """
    arrays = memory_by_phase(step)
    fullest, programs, available = dict(arrays), [], device_memory_bytes()
    for one, text in compile_programs(step) if compiles else ():
        programs.append(one)
        if on_program is not None:
            on_program(one, text)
        shared = one.phase == "rollout" and "evaluation" in arrays and _evaluates_with_rollout_programs(step.session)
        for phase in (one.phase, "evaluation") if shared else (one.phase,):
            buffers = {**arrays[phase], "temporaries": one.temporary_bytes, "padding": one.padding_bytes}
            check_fits(phase, one.name, buffers, available_bytes=available)
            fullest[phase] = max(fullest[phase], buffers, key=lambda held: sum(held.values()))
    return fullest, tuple(programs)


def check_fits(phase: str, name: str, buffers: MemoryBreakdown, *, available_bytes: int | None) -> None:
    """Raises InputError if the arrays on a device and the temporaries of a program exceed the device's memory.

    Args:
        available_bytes: memory of a device; None if it is unknown, which passes the check.
    """
    needed = sum(buffers.values())
    if available_bytes is None or needed <= available_bytes:
        return
    largest = sorted(((size, name) for name, size in buffers.items() if size), reverse=True)
    parts = ", ".join(f"{MEMORY_LABELS[name].removesuffix(' *')} {format_bytes(size)}" for size, name in largest)
    missing, available = format_bytes(needed - available_bytes), format_bytes(available_bytes)
    reason = f"it needs {format_bytes(needed)} on each device, {missing} more than the available {available}: {parts}."
    raise _does_not_fit(phase, name, reason)


def _does_not_fit(phase: str, name: str, reason: str) -> InputError:
    advice = f"{MEMORY_ADVICE[phase].format(role=name)}, or split the weights over more devices with mesh.shape"
    return InputError(f"{phase}: {name} does not fit: {reason} {advice[0].upper()}{advice[1:]}")


def compile_programs(step: StepOutline) -> Iterator[tuple[CompiledProgram, str]]:
    """Compiles the programs of a step one after the other; yields each with its HLO text."""
    backend = step.session.mesh.devices.flat[0].platform
    for phase, name, lowered, turns in _lower_programs(step):
        started = time.perf_counter()
        compiled = _compile(lowered, phase, name)
        took = time.perf_counter() - started
        analysis: Any = compiled.memory_analysis()
        text, sent = compiled.as_text() or "", None
        if backend == "tpu":
            sent = dict(HloProgram(text).sent_bytes(turns, turn_of=DECODE_SCOPE if name == "decode" else None))
        program = CompiledProgram(
            phase=phase,
            name=name,
            backend=backend,
            argument_bytes=analysis.argument_size_in_bytes,
            output_bytes=analysis.output_size_in_bytes,
            aliased_bytes=analysis.alias_size_in_bytes,
            temporary_bytes=analysis.temp_size_in_bytes,
            padding_bytes=max(0, analysis.argument_size_in_bytes - _argument_bytes(lowered, compiled)),
            collective_bytes=sent,
            compile_s=took,
        )
        yield program, text


def _compile(lowered: Lowered, phase: str, name: str) -> Compiled:
    """Compiles a program; raises InputError with the compiler's figures if it does not fit."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        if not lines[0].startswith("RESOURCE_EXHAUSTED"):
            raise InputError(
                f"{phase}: {name} does not compile with {compiler_versions()}: {lines[0]}; install the compiler that "
                "this JAX needs (pip install -e '.[tpu]' or '.[cuda]'), or omit --compile"
            ) from error
        if re.search("memory space [vs]mem", lines[0]) and "attention_" in str(error):
            raise InputError(
                f"{phase}: {name} does not compile: the attention kernel needs more on-chip memory than the device has "
                f"({lines[0].removeprefix('RESOURCE_EXHAUSTED: ')}); set model.attention: xla"
            ) from error
        largest = ", ".join(line.partition(": ")[2] for line in lines if re.match(r"(\d+\. )?Size: ", line))
        named = f" Its largest buffers: {largest}." if largest else ""
        raise _does_not_fit(phase, name, lines[0].removeprefix("RESOURCE_EXHAUSTED: ") + named) from None


def _argument_bytes(lowered: Lowered, compiled: Compiled) -> int:
    """Returns the bytes per device of the arguments that a program uses, computed from their shapes.

    Like the compiler's figures, this excludes arguments in host memory.
    """

    def num_bytes(argument: Any, sharding: Any) -> int:
        if sharding is None or is_in_host_memory(sharding):
            return 0
        return math.prod(sharding.shard_shape(argument.shape)) * argument.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, lowered.args_info, compiled.input_shardings)))


def _lower_programs(step: StepOutline) -> Iterator[LoweredProgram]:
    """Lowers and yields each program of a step, for the longest samples."""
    session, reward_model = step.session, step.reward_model
    mesh, model, dtype = session.mesh, session.model_spec, set_compute_dtype(session.settings)
    yield from _lower_generation(step)
    networks: dict[str, tuple[DecoderDefinition, PackedForward]] = {
        "policy": (model.policy_definition, session.scoring.scorer),
        "reference": (session.scoring.held_reference, session.scoring.reference_scorer),
    }
    if (critic := session.scoring.critic) is not None:
        networks["critic"] = critic.spec.definition, critic.valuer
    scored = [("score", role, *networks[role], plan) for role, plan in step.scores.items()]
    if reward_model is not None and step.reward is not None:
        valuer = ValueScorer(reward_model.definition, mesh, dtype=dtype)
        scored.insert(0, ("reward", "model", reward_model.definition.held_in(dtype), valuer, step.reward))
    for phase, name, definition, scorer, plan in scored:
        params = abstract_arrays(definition.shapes, definition.shardings(mesh))
        batch = _global_shapes(mesh, pack_tokens((), _empty_micro_batch(plan), scorer.route_shape))
        turns = _lm_head_turns(session, plan) if isinstance(scorer, Scorer) else {}
        yield LoweredProgram(phase, name, scorer.lower(params, batch), turns)
    for phase, learner, plan in (
        ("critic", step.learning.critic, step.critic_update),
        ("update", step.learning.policy, step.update),
    ):
        if learner is not None and plan is not None:
            lowered, turns = lower_update(session, learner, plan), _lm_head_turns(session, plan)
            yield LoweredProgram(phase, "gradients", lowered["gradients"], turns if phase == "update" else {})
            yield LoweredProgram(phase, "optimizer", lowered["optimizer"])


def _lm_head_turns(session: Session, plan: MicroBatchPlan) -> dict[str, int]:
    """Maps the name scope of the loop over LM head chunks to its number of iterations for the fullest row."""
    largest, settings = largest_micro_batch(plan), session.settings
    rows_on_device = len(largest.rows) // num_local_row_shards(session.mesh)
    chunk = min(max(1, settings.model.logits_chunk // rows_on_device), largest.shape.num_completion_tokens)
    most = max(sum(map(len, row)) for row in largest.rows) * settings.rollout.max_new_tokens
    return {LM_HEAD_SCOPE: math.ceil(most / chunk)}


def _evaluates_with_rollout_programs(session: Session) -> bool:
    return session.evaluation_generator is session.generator


def _lower_generation(step: StepOutline) -> Iterator[LoweredProgram]:
    """Lowers and yields the prefill and decode programs of this host's devices; none if Ray workers generate."""
    session, done = step.session, False
    for phase, shape, rules in (
        ("rollout", step.rollout, sampling_rules(session.settings)),
        ("evaluation", step.evaluation, eval_sampling_rules(session.settings)),
    ):
        if shape is None or (done and _evaluates_with_rollout_programs(session)):
            continue
        generator = session.generator if phase == "rollout" else session.evaluation_generator
        if generator is session.workers and session.settings.rollout.uses_ray:
            continue
        slots, done = generator.engine, True
        programs = slots.programs.lower_programs(truncates=rules.truncates, recomputes=slots.recomputes)
        for name, lowered in programs.items():
            yield LoweredProgram(phase, name, lowered)


def lower_update(session: Session, learner: Learner, plan: MicroBatchPlan) -> dict[str, Lowered]:
    """Returns the lowered programs of an optimizer step: `gradients` for the largest micro-batch, and `optimizer`."""
    empty = learner.updater.pack((), _empty_micro_batch(plan), StepTotals(num_tokens=0, num_samples=0))
    batch = _global_shapes(session.mesh, empty)
    with jax.set_mesh(session.mesh):
        # Arrays cannot be created on compile-only devices.
        temperature: Any = jax.ShapeDtypeStruct((), np.float32)
        return learner.update_step.lower(learner.layout, batch, temperature, learner.frozen_layout)


def _empty_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """Returns a micro-batch without samples whose arrays have the shapes of the largest one."""
    largest = largest_micro_batch(plan)
    return MicroBatch(((),) * len(largest.rows), largest.shape)


def _global_shapes(mesh: Mesh, batch: Any) -> Any:
    """Returns the shapes of the global batch, which has the rows of all hosts."""
    rows, hosts = row_sharding(mesh), num_hosts(mesh)
    shape_of = lambda x: jax.ShapeDtypeStruct((x.shape[0] * hosts, *x.shape[1:]), x.dtype, sharding=rows)  # noqa: E731
    return jax.tree.map(shape_of, batch)


def format_step_memory(
    memory: Mapping[str, MemoryBreakdown], programs: Sequence[CompiledProgram], *, available_bytes: int | None
) -> str:
    """Returns a table of each phase's memory, the peak and whether it fits, and a table of any compiled programs.

    Args:
        available_bytes: memory of a device; None if it is unknown.
    """
    phase = peak_phase(memory)
    needed = sum(memory[phase].values())
    peak = f"peak: {phase} needs {format_bytes(needed)} on each device"
    lines = [format_memory_table(memory), ""]
    if available_bytes is None:
        lines.append(f"{peak}, whose memory is unknown")
    else:
        lines.append(f"{peak}, {format_percent(needed / available_bytes)} of its {format_bytes(available_bytes)}")
        if needed > available_bytes:
            advice = f"{MEMORY_ADVICE[phase]}, or " if phase in ("rollout", "evaluation") else ""
            lines.append(f"this does not fit: {advice}split the weights over more devices with mesh.shape")
    if programs:
        lines += ["", _format_programs_table(programs)]
    return "\n".join(lines)


def _format_programs_table(programs: Sequence[CompiledProgram]) -> str:
    """Returns a table of each program's memory and, for TPUs, the bytes that its collectives send."""
    head = ["on each device", "arguments", "outputs", "aliased", "temporaries", "compiled in"]
    has_collectives = programs[0].collective_bytes is not None
    if has_collectives:
        head.append("sends to others")
    rows = []
    for one in programs:
        sizes = (one.argument_bytes, one.output_bytes, one.aliased_bytes, one.temporary_bytes)
        row = [f"{one.phase}: {one.name}", *map(format_bytes, sizes), f"{one.compile_s:.1f} s"]
        if one.collective_bytes is not None:
            row.append(format_bytes(sum(one.collective_bytes.values())))
        rows.append(row)
    backend = programs[0].backend
    note = ", which multiplies bfloat16 as float32 copies" if backend == "cpu" else ""
    table = format_table(rows, header=head)
    reported = f"Arguments and outputs are exact. Temporaries are those reported by the compiler for {backend}{note}."
    if has_collectives:
        reported += " Sent bytes are per call with the fullest rows; for decode, per token of all rows."
    return f"{table}\n{reported}"
