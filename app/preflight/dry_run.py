"""`grpo train --dry-run`: runs every check of a launch, then reports the sizes and the memory of a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from app.batching.micro_batch_plan import MicroBatchPlan, SequenceLengths
from app.distributed.collectives import error_barrier
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_kind, device_memory_bytes, simulated_slice
from app.mesh.placement import num_local_row_shards
from app.preflight.compiled_programs import CompiledProgram, format_step_memory, step_memory
from app.preflight.phase_memory import StepOutline, largest_micro_batch, outline_step, peak_phase, state_bytes
from app.records.run_directory import Resume
from app.records.text_format import format_bytes, format_count, format_table
from app.tracking.performance import make_step_flops
from app.training.network_memory import MemoryBreakdown
from app.training.replay import NO_OPTIONS, StartRequest
from app.training.setup import RunSetup, prepare_run
from settings import Resolved
from settings.checks.unused_settings import launch_notices


@dataclass(frozen=True)
class MicroBatchSummary:
    """Number and shape of the micro-batches in one pass, if all prompts and completions have maximum length."""

    count: int
    rows_per_device: int
    tokens_per_row: int

    def to_text(self) -> str:
        return (
            f"at most {self.count:,} micro-batches of {self.rows_per_device:,} rows per device, "
            f"{self.tokens_per_row:,} tokens per row"
        )


@dataclass(frozen=True)
class DryRunReport:
    """Sizes of a run. Counts are over all hosts, bytes are on each device."""

    directory: str
    notes: tuple[str, ...]
    """Notes that `grpo train` would print at launch."""
    model: str
    family: str
    dtype: str
    num_parameters: int
    """Number of parameters of the policy, including adapters."""
    num_trained_parameters: int
    mesh: Mapping[str, int]
    device_kind: str
    num_devices: int
    num_hosts: int
    is_pretended: bool
    """True if virtual devices simulate the slice of `mesh.pretend`."""
    data: str
    """Report on the data: column mapping, prompts kept and dropped, lengths."""
    num_prompts: int
    num_held_out: int
    steps: int
    optimizer_steps: int
    epochs_of_data: float
    max_rounds_per_step: int
    """Maximum number of rollouts in a step; 1 without `algorithm.filter`."""
    prompts_per_step: int
    samples_per_step: int
    prompt_tokens_per_step: int
    """Prompt tokens in a step, on average over the data; each prompt is counted once per sample."""
    max_completion_tokens_per_step: int
    max_flops_per_step: float
    mini_batches_per_step: int
    epochs_per_step: int
    max_staleness: int
    """Maximum number of training steps by which generation runs ahead; 0 if generation and training alternate."""
    rollout: Mapping[str, int] | None
    """Sizes of a rollout on each host, including padding; None if samples come from files."""
    evaluation: Mapping[str, int] | None
    score: Mapping[str, MicroBatchSummary]
    """Micro-batches of the scoring pass of each role; empty if nothing is scored."""
    update: MicroBatchSummary
    """Micro-batches of one optimizer step of the policy."""
    critic_update: MicroBatchSummary | None
    num_critic_parameters: int
    reward_model: MicroBatchSummary | None
    """Micro-batches of the reward model in a step; None without a reward model."""
    num_reward_model_parameters: int
    memory: Mapping[str, MemoryBreakdown]
    """Bytes of each buffer on a device, for each phase; with `--compile`, also the temporaries of programs."""
    programs: tuple[CompiledProgram, ...]
    """Compiled programs; empty without `--compile`."""
    peak_bytes: int
    available_bytes: int | None
    """Memory of a device, or on a CPU its share of the host's memory; None if unknown."""
    checkpoint_bytes: int
    """Size of a checkpoint on disk, and in the memory of all hosts while it is written."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as a dict that can be written as JSON."""
        return asdict(self)

    def to_text(self) -> str:
        table = format_table([part for part in self._sizes() if part[1]], header=("", ""), num_left=2)
        memory = format_step_memory(self.memory, self.programs, available_bytes=self.available_bytes)
        size = format_bytes(self.checkpoint_bytes)
        saved = f"a checkpoint takes {size} on disk, and the same amount of the hosts' memory while it is written"
        return "\n".join([table.lstrip("\n"), "", memory, saved])

    def _sizes(self) -> Iterator[tuple[str, str]]:
        """Yields the name and the text of each part of the run; the text is empty if the run has no such part."""
        at_least = "at least " if self.max_rounds_per_step > 1 else ""
        updates = format_count(self.optimizer_steps, "optimizer step")
        run = f"{self.directory}: {format_count(self.steps, 'step')}, {updates}, "
        yield "run", "\n".join([f"{run}{at_least}{self.epochs_of_data:.3g} epochs of the data", *self.notes])
        networks = {"critic": self.num_critic_parameters, "reward model": self.num_reward_model_parameters}
        others = "".join(f"; {name}: {count:,}" for name, count in networks.items() if count)
        model = f"{self.model} ({self.family}): {self.num_parameters:,} parameters"
        yield "model", f"{model}, computing in {self.dtype}{others}"
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        simulated = " (simulated)" if self.is_pretended else ""
        yield "mesh", f"{self.num_devices} x {self.device_kind} on {self.num_hosts} host(s): {axes}{simulated}"
        yield "data", f"{self.data}\nheld out: {self.num_held_out:,}" if self.num_held_out else self.data
        yield (
            "step",
            f"{self.prompts_per_step:,} prompts, {self.samples_per_step:,} samples; "
            f"{self.prompt_tokens_per_step:,} prompt tokens on average, at most "
            f"{self.max_completion_tokens_per_step:,} completion tokens, {self.max_flops_per_step / 1e12:.3g} TFLOP",
        )
        staleness = format_count(self.max_staleness, "step")
        ahead = f"\nasynchronous, at most {staleness} ahead of training" if self.max_staleness else ""
        yield "rollout", f"{_format_generation(self.rollout)}{ahead}" if self.rollout else ""
        yield "evaluation", _format_generation(self.evaluation) if self.evaluation else ""
        yield "score reward", self.reward_model.to_text() if self.reward_model else ""
        for role, passes in self.score.items():
            yield f"score {role}", passes.to_text()
        steps = f"{self.mini_batches_per_step * self.epochs_per_step} optimizer steps (mini-batches "
        steps += f"{self.mini_batches_per_step} x epochs {self.epochs_per_step})"
        yield "update", f"{steps}, each {self.update.to_text()}"
        yield "critic", f"the same number of steps, each {self.critic_update.to_text()}" if self.critic_update else ""


def _format_generation(sizes: Mapping[str, int]) -> str:
    return (
        f"{sizes['num_prompts']:,} prompts of {sizes['prompt_length']:,} tokens, {sizes['num_rows']:,} rows with a "
        f"cache of {sizes['cache_length']:,} tokens, on each host"
    )


def make_dry_run_report(
    resolved: Resolved,
    *,
    resume: Resume,
    start_request: StartRequest = NO_OPTIONS,
    allow_changed: Sequence[str] = (),
    compiles: bool = False,
) -> DryRunReport | None:
    """Returns the sizes of a run, from shapes and file headers; None on all processes but process 0.

    Runs the checks of a launch (`prepare_run`). Loads no weights and writes nothing.

    Args:
        compiles: whether to compile the programs of every phase and include their temporaries in its memory.

    Raises:
        InputError: the run could not start, or a program does not fit. The checkpoint of a resumed run is not checked.
    """
    run = {"resume": resume, "start_request": start_request, "allow_changed": allow_changed}
    with prepare_run(resolved, **run, compiles=compiles) as launch:
        session, learning, inputs = launch.session, launch.learning, launch.inputs
        step = outline_step(session, learning, inputs.prompts, inputs.eval_prompts, inputs.reward_model)
        with error_barrier():
            memory, programs = step_memory(step, compiles=compiles)
        return None if jax.process_index() else _make_report(launch, step, memory, programs)


def _make_report(
    launch: RunSetup,
    step: StepOutline,
    memory: Mapping[str, MemoryBreakdown],
    programs: tuple[CompiledProgram, ...],
) -> DryRunReport:
    settings, session, inputs, mesh = launch.resolved.settings, step.session, launch.inputs, step.session.mesh
    policy, critic, reward_model = session.model_spec.policy_definition, session.scoring.critic, inputs.reward_model
    rollout, warmup = settings.rollout, settings.critic.warmup_steps if settings.has_critic else 0
    prompts_per_step = rollout.prompts_per_step * num_hosts(mesh)
    samples_per_step = prompts_per_step * rollout.group_size
    mean_prompt = sum(len(prompt.token_ids) for prompt in inputs.prompts) / len(inputs.prompts)

    def summary(plan: MicroBatchPlan) -> MicroBatchSummary:
        largest, num_shards = largest_micro_batch(plan), num_local_row_shards(mesh)
        return MicroBatchSummary(len(plan.micro_batches), len(largest.rows) // num_shards, largest.shape.num_tokens)

    return DryRunReport(
        directory=str(launch.run.path),
        notes=(*launch_notices(launch.resolved), *launch.notes),
        model=settings.model.path,
        family=session.model_spec.architecture.family,
        dtype=settings.model.dtype,
        num_parameters=policy.num_parameters,
        num_trained_parameters=policy.num_trainable,
        mesh=dict(mesh.shape),
        device_kind=device_kind(mesh.devices.flat[0]),
        num_devices=mesh.size,
        num_hosts=num_hosts(mesh),
        is_pretended=simulated_slice() is not None,
        data=inputs.data_report,
        num_prompts=len(inputs.prompts),
        num_held_out=len(inputs.eval_prompts),
        steps=len(launch.steps),
        optimizer_steps=len([one for one in launch.steps if one > warmup]) * settings.updates_per_step,
        epochs_of_data=len(launch.steps) * prompts_per_step / len(inputs.prompts),
        max_rounds_per_step=step.learning.max_rounds,
        prompts_per_step=prompts_per_step,
        samples_per_step=samples_per_step,
        prompt_tokens_per_step=round(samples_per_step * mean_prompt),
        max_completion_tokens_per_step=samples_per_step * rollout.max_new_tokens,
        max_flops_per_step=_max_flops(launch, prompts_per_step, round(mean_prompt)),
        mini_batches_per_step=settings.num_mini_batches,
        epochs_per_step=settings.algorithm.epochs,
        max_staleness=rollout.max_staleness,
        rollout=step.rollout and step.rollout._asdict(),
        evaluation=step.evaluation and step.evaluation._asdict(),
        score={role: summary(plan) for role, plan in step.scores.items()},
        update=summary(step.update),
        critic_update=step.critic_update and summary(step.critic_update),
        num_critic_parameters=critic.spec.definition.num_parameters if critic else 0,
        reward_model=step.reward and summary(step.reward),
        num_reward_model_parameters=reward_model.definition.num_parameters if reward_model else 0,
        memory=memory,
        programs=programs,
        peak_bytes=sum(memory[peak_phase(memory)].values()),
        available_bytes=device_memory_bytes(),
        checkpoint_bytes=state_bytes(step.learning),
    )


def _max_flops(launch: RunSetup, num_prompts: int, mean_prompt: int) -> float:
    settings, inputs = launch.resolved.settings, launch.inputs
    prompt_keys = np.arange(num_prompts).repeat(settings.rollout.group_size)
    sizes = (mean_prompt, settings.rollout.max_new_tokens)
    prompts, completions = (np.full_like(prompt_keys, size) for size in sizes)
    lengths = SequenceLengths(prompts, completions, prompt_keys)
    # The reward model reads one more token.
    conversations = replace(lengths, completions=lengths.completions + 1)
    return make_step_flops(settings, launch.session, inputs.reward_model).total(
        sampled=lengths if launch.session.generates == "rollouts" else None, learned=lengths, rewarded=[conversations]
    )
