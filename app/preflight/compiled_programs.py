"""The programs of a step and their memory as the compiler reports it, without loading weights or samples."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jax.stages import Compiled, Lowered

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan
from app.batching.token_batch import pack_tokens
from app.mesh.chips import find_chip
from app.mesh.compile_only import compiler_versions, kernel_schedules
from app.mesh.device_memory import device_memory_bytes
from app.mesh.device_mesh import num_hosts
from app.mesh.placement import abstract_arrays, is_in_host_memory, row_sharding
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition
from app.model.prefill_and_decode import DECODE_SCOPE
from app.preflight.kernel_time import take_scheduled_bundles
from app.preflight.memory import (
    MEMORY_ADVICE,
    MEMORY_LABELS,
    StepShapes,
    largest_micro_batch,
    memory_by_phase,
)
from app.preflight.program_time import PARTS, program_time
from app.preflight.program_work import ProgramWork, generation_work, longest_samples, packed_pass_work
from app.records.atomic_write import write_atomic
from app.records.text_format import format_bytes, format_percent, format_table
from app.rollout.batch_engine import BatchShape
from app.runtime.reward_model import NetworkSpec
from app.runtime.scoring import set_compute_dtype
from app.runtime.session import Session
from app.score.scorer import PackedForward, Scorer, ValueScorer
from app.training.learner import Learner, LearnerGroup
from app.training.network_memory import MemoryBreakdown
from app.update.loss_aggregation import StepTotals
from settings.errors import InputError


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
    padding_bytes: int
    """Bytes by which the arguments exceed their shapes, since a TPU pads dimensions to the size of its tiles."""
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


class StepMemory(NamedTuple):
    """The memory of a step on each device."""

    phases: Mapping[str, MemoryBreakdown]
    """Memory by phase: its arrays, and if programs were compiled the temporaries of the one that needs most."""
    programs: tuple[CompiledProgram, ...]


def step_memory(
    session: Session,
    learning: LearnerGroup,
    shapes: StepShapes,
    reward_model: NetworkSpec | None,
    *,
    compiles: bool,
    hlo: Path | None = None,
) -> StepMemory:
    """Returns the memory of each phase of a step, with `compiles` that of its programs included.

    Programs are compiled for the devices of the mesh, which need not be there.

    Args:
        hlo: folder for the texts of the programs.

    Raises:
        InputError: a program does not fit.
    """
    arrays = memory_by_phase(session, learning, shapes, reward_model)
    fullest, programs, available = dict(arrays), [], device_memory_bytes()
    # Slots have one cache. A batch has none of its rows during the prefill, and none of its prompts during decoding.
    absent = {"prefill": "kv_cache", "decode": "prompt_cache"} if session.continuous_generator is None else {}
    for one in compile_programs(session, learning, shapes, reward_model, hlo) if compiles else ():
        programs.append(one)
        shared = one.phase == "rollout" and "evaluation" in arrays and _evaluates_with_rollout_programs(session)
        for phase in (one.phase, "evaluation") if shared else (one.phase,):
            buffers = {name: size for name, size in arrays[phase].items() if name != absent.get(one.name)}
            buffers |= {"temporaries": one.temporary_bytes, "padding": one.padding_bytes}
            check_fits(phase, one.name, buffers, available_bytes=available)
            fullest[phase] = max(fullest[phase], buffers, key=lambda held: sum(held.values()))
    return StepMemory(fullest, tuple(programs))


def check_fits(phase: str, name: str, buffers: MemoryBreakdown, *, available_bytes: int | None) -> None:
    """Raises InputError if the arrays on a device and the temporaries of a program exceed the device's memory.

    Args:
        available_bytes: None if it is unknown.
    """
    needed = sum(buffers.values())
    if available_bytes is None or needed <= available_bytes:
        return
    largest = sorted(((size, name) for name, size in buffers.items() if size), reverse=True)
    parts = ", ".join(f"{MEMORY_LABELS[name].removesuffix(' *')} {format_bytes(size)}" for size, name in largest)
    reason = f"it needs {format_bytes(needed)} of the {format_bytes(available_bytes)} of a device, "
    raise _does_not_fit(phase, name, f"{reason}{format_bytes(needed - available_bytes)} too much: {parts}.")


def _does_not_fit(phase: str, name: str, reason: str) -> InputError:
    advice = f"{MEMORY_ADVICE[phase].format(role=name)}, or split the weights over more devices with mesh.shape"
    return InputError(f"{phase}: {name} does not fit: {reason} {advice[0].upper()}{advice[1:]}")


def compile_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, reward_model: NetworkSpec | None, hlo: Path | None
) -> Iterator[CompiledProgram]:
    """Compiles the programs of a step one after the other; see `step_memory`."""
    device = session.mesh.devices.flat[0]
    chip = find_chip(device.device_kind) if device.platform == "tpu" else None
    take_scheduled_bundles(kernel_schedules())  # those of programs that this process compiled before
    bundles: dict[str, int] = {}
    for phase, name, lowered, work in _lower_programs(session, learning, shapes, reward_model):
        started = time.perf_counter()
        compiled = _compile(lowered, phase, name)
        analysis: Any = compiled.memory_analysis()
        took = time.perf_counter() - started
        text = compiled.as_text() or ""
        if hlo is not None:
            hlo.mkdir(parents=True, exist_ok=True)
            write_atomic(hlo / f"{phase}_{name}.hlo", text.encode())
        bundles |= take_scheduled_bundles(kernel_schedules())
        estimate = mfu = None
        if chip is not None:
            turn_of = DECODE_SCOPE if name == "decode" else None
            estimate = program_time(text, chip, bundles=bundles, turns=work.turns, turn_of=turn_of)
            mfu = work.model_flops / estimate.estimated_s / chip.flops
        yield CompiledProgram(
            phase=phase,
            name=name,
            backend=device.platform,
            argument_bytes=analysis.argument_size_in_bytes,
            output_bytes=analysis.output_size_in_bytes,
            aliased_bytes=analysis.alias_size_in_bytes,
            temporary_bytes=analysis.temp_size_in_bytes,
            padding_bytes=max(0, analysis.argument_size_in_bytes - _argument_bytes(lowered, compiled)),
            compute_s=estimate and estimate.compute_s,
            kernel_s=estimate and estimate.kernel_s,
            exposed_collective_s=estimate and estimate.exposed_collective_s,
            estimated_s=estimate and estimate.estimated_s,
            parts_s=estimate and {part: estimate.parts[part] for part in PARTS},
            model_flops=work.model_flops or None,
            mfu=mfu or None,
            collective_bytes=estimate and dict(estimate.collective_bytes),
            compile_s=took,
        )


def _compile(lowered: Lowered, phase: str, name: str) -> Compiled:
    """Compiles a program; raises InputError with the compiler's figures if it does not fit."""
    try:
        return lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines()]
        if not lines[0].startswith("RESOURCE_EXHAUSTED"):
            raise InputError(
                f"{phase}: {name} does not compile: {lines[0]} (with {compiler_versions()}; pip install -e '.[tpu]' "
                "or '.[cuda]' installs the compiler that belongs to this JAX)"
            ) from error
        if re.search("memory space [vs]mem", lines[0]) and "attention_" in str(error):
            raise InputError(
                f"{phase}: {name} does not compile: the attention kernel needs more memory than there is on the chip "
                f"({lines[0].removeprefix('RESOURCE_EXHAUSTED: ')}); set model.attention: xla"
            ) from error
        largest = ", ".join(line.partition(": ")[2] for line in lines if re.match(r"(\d+\. )?Size: ", line))
        named = f" Its largest buffers: {largest}." if largest else ""
        raise _does_not_fit(phase, name, lines[0].removeprefix("RESOURCE_EXHAUSTED: ") + named) from None


def _argument_bytes(lowered: Lowered, compiled: Compiled) -> int:
    """Returns the bytes of a program's arguments on each device by their shapes, without those that it ignores.

    Those in host memory do not count, as for the compiler.
    """

    def num_bytes(argument: Any, sharding: Any) -> int:
        if sharding is None or is_in_host_memory(sharding):
            return 0
        return math.prod(sharding.shard_shape(argument.shape)) * argument.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(num_bytes, lowered.args_info, compiled.input_shardings)))


def _lower_programs(
    session: Session, learning: LearnerGroup, shapes: StepShapes, reward_model: NetworkSpec | None
) -> Iterator[tuple[str, str, Lowered, ProgramWork]]:
    """Yields (phase, name, lowered program, its work) for each program of a step, with the longest samples."""
    settings, mesh, model = session.settings, session.mesh, session.model_spec
    dtype, logits_chunk = set_compute_dtype(settings), settings.model.logits_chunk
    yield from _lower_generation(session, shapes)

    def work_of(architecture: Architecture, plan: MicroBatchPlan, **how: Any) -> ProgramWork:
        # The reward model reads one more token.
        completion = settings.rollout.max_new_tokens + (plan is shapes.reward)
        # One plan is made for all hosts' samples, any of which can be in the rows of this one.
        num_samples = settings.rollout.prompts_per_step * settings.rollout.group_size * num_hosts(mesh)
        samples = longest_samples(num_samples, prompt=shapes.longest_prompt, completion=completion)
        return packed_pass_work(architecture, mesh, dtype, samples, largest_micro_batch(plan), **how)

    networks: dict[str, tuple[DecoderDefinition, PackedForward]] = {
        "policy": (model.policy_definition, session.scorer),
        "reference": (session.held_reference, session.reference_scorer),
    }
    if session.critic is not None:
        networks["critic"] = session.critic.spec.definition, session.critic.valuer
    scored = [("score", role, *networks[role], plan) for role, plan in shapes.scores.items()]
    if reward_model is not None and shapes.reward is not None:
        valuer = ValueScorer(reward_model.definition, mesh, dtype=dtype)
        scored.insert(0, ("reward", "model", reward_model.definition.held_in(dtype), valuer, shapes.reward))
    for phase, name, definition, scorer, plan in scored:
        params = abstract_arrays(definition.shapes, definition.shardings(mesh))
        batch = _global_shapes(mesh, pack_tokens((), _empty_micro_batch(plan), scorer.route_shape))
        chunk = logits_chunk if isinstance(scorer, Scorer) else None
        work = work_of(definition.architecture, plan, logits_chunk=chunk, has_gradients=False)
        yield phase, name, scorer.lower(params, batch), work
    for phase, learner, plan in (
        ("critic", learning.critic, shapes.critic_update),
        ("update", learning.policy, shapes.update),
    ):
        if learner is not None and plan is not None:
            lowered, is_policy = lower_update(session, learner, plan), phase == "update"
            architecture = session.architecture_of("policy" if is_policy else "critic")
            work = work_of(architecture, plan, logits_chunk=logits_chunk if is_policy else None, has_gradients=True)
            yield phase, "gradients", lowered["gradients"], work
            yield phase, "optimizer", lowered["optimizer"], ProgramWork(0, {})


def _evaluates_with_rollout_programs(session: Session) -> bool:
    return session.evaluation_generator is not None and session.evaluation_generator is session.continuous_generator


def _lower_generation(session: Session, shapes: StepShapes) -> Iterator[tuple[str, str, Lowered, ProgramWork]]:
    """Yields (phase, name, lowered program, its work) for prefill and decode on this host's devices."""
    found: list[tuple[str, Mesh, BatchShape, Mapping[str, Lowered]]] = []
    for phase, generator, shape, rules in (
        ("rollout", session.continuous_generator, shapes.rollout, session.sampling_params),
        ("evaluation", session.evaluation_generator, shapes.evaluation, session.eval_sampling_params),
    ):
        if shape is None or (found and _evaluates_with_rollout_programs(session)):
            continue
        if generator is None:
            programs = session.engine.lower_programs(shape, truncates=rules.truncates)
            found.append((phase, session.engine.mesh, shape, programs))
        elif generator is not session.workers or session.settings.rollout.pool != "ray":
            slots = generator.engine
            programs = slots.programs.lower_programs(truncates=rules.truncates, recomputes=slots.recomputes)
            found.append((phase, slots.programs.mesh, shape, programs))
    for phase, mesh, shape, programs in found:
        work_of = functools.partial(
            generation_work, session.model_spec.architecture, mesh, session.settings.model.dtype
        )
        work = work_of(shape)
        if "recompute" in programs:
            whole_row = shape._replace(num_prompts=1, prompt_length=shape.cache_length)
            work["recompute"] = work_of(whole_row)["prefill"]
        for name, lowered in programs.items():
            yield phase, name, lowered, work[name]


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
    head = ("on each device", "arguments", "outputs", "aliased", "temporaries", "compiled in")
    rows = []
    for one in programs:
        sizes = (one.argument_bytes, one.output_bytes, one.aliased_bytes, one.temporary_bytes)
        rows.append((f"{one.phase}: {one.name}", *map(format_bytes, sizes), f"{one.compile_s:.1f} s"))
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
