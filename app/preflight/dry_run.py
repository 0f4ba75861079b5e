"""`grpo train --dry-run`: every check of a launch, then its arithmetic and its memory in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax

from app.batching.micro_batch_plan import MicroBatchPlan
from app.batching.micro_batcher import MicroBatcher, PackedRowBatcher
from app.mesh.device_memory import device_memory_bytes
from app.mesh.topology import device_kind, num_hosts, simulated_slice
from app.preflight.activation_memory import MemoryBreakdown, largest_micro_batch, rows_per_device
from app.preflight.memory import StepShapes, compute_step_shapes, format_memory_table, memory_by_phase, state_bytes
from app.records.run_directory import Resume
from app.runtime.reward_model import make_reward_batcher
from app.runtime.session import Session
from app.tracking.flops import NO_TOKENS, TokenCounts, make_step_flops
from app.training.learner import LearnerGroup
from app.training.replay import ReplayRequest
from app.training.setup import RunSetup, prepare_run
from settings import Resolved
from settings.checks.unused_settings import launch_notices

MEMORY_ADVICE = {
    "rollout": "lower rollout.prompts_per_step, rollout.group_size or rollout.max_new_tokens",
    "evaluation": "lower rollout.prompts_per_step, rollout.group_size or rollout.max_new_tokens",
    "reward": "lower score.reward.{knob}",
    "score": "lower score.{knob} or model.logits_chunk",
    "critic": "lower critic.{knob}, set model.remat: block",
    "update": "lower algorithm.{knob}, set model.remat: block",
}
"""What makes each phase smaller."""
REPLAY_MEMORY_ADVICE = {
    "evaluation": "set eval.every_steps: 0 and checkpoint.best_metric: null (`grpo evaluate` measures what is saved), "
    "or lower rollout.max_new_tokens to what the longest of the samples has",
}
"""Others than these of a replay, whose groups are as many and as large as those of the samples."""


@dataclass(frozen=True)
class MicroBatchSummary:
    """One pass at the longest prompts and completions, so the most micro-batches there can be."""

    count: int
    packed: bool
    """Under a token quota; else a fixed number of rows."""
    rows_per_device: int
    tokens_per_row: int


@dataclass(frozen=True)
class DryRunReport:
    """What a run would do and hold. Counts are over all hosts, bytes on each device."""

    directory: str
    notes: tuple[str, ...]
    """What a launch tells of the settings, and of how weights move."""
    model: str
    family: str
    dtype: str
    num_parameters: int
    """Of the policy, adapters among them."""
    num_trained_parameters: int
    """All of them, or those of the adapters."""
    mesh: Mapping[str, int]
    device_kind: str
    num_devices: int
    num_hosts: int
    is_pretended: bool
    """Virtual devices stand for those of `mesh.pretend`."""
    data: str
    """Column mapping, prompts kept and dropped, lengths."""
    num_prompts: int
    num_held_out: int
    steps: int
    optimizer_steps: int
    epochs_of_data: float
    max_rounds_per_step: int
    """Rollouts, and so prompts, of a step may be so many times `prompts_per_step`: 1 without a filter."""
    prompts_per_step: int
    samples_per_step: int
    prompt_tokens_per_step: int
    """On average over the data; a prompt counts once for each of its samples."""
    max_completion_tokens_per_step: int
    max_flops_per_step: float
    mini_batches_per_step: int
    epochs_per_step: int
    max_staleness: int
    """Steps that generation is ahead of training at most; 0 where they wait for each other."""
    rollout: Mapping[str, int] | None
    """Sizes of a generation on each host, lengths in tokens, padding included; None where samples come from files."""
    evaluation: Mapping[str, int] | None
    score: Mapping[str, MicroBatchSummary]
    """By role; empty where nothing is scored."""
    update: MicroBatchSummary
    """Of one optimizer step."""
    critic_update: MicroBatchSummary | None
    """Of one of the critic; None without one."""
    num_critic_parameters: int
    reward_model: MicroBatchSummary | None
    """Passes of a step through the reward model; None without one."""
    num_reward_model_parameters: int
    memory: Mapping[str, MemoryBreakdown]
    """By phase. What `app.preflight.memory.LABELS` stars is estimated, the rest follows from shapes."""
    peak_bytes: int
    """Of the fullest phase."""
    available_bytes: int | None
    """A device's memory; on a CPU each device's share of the host's. None where it is not known."""
    checkpoint_bytes: int
    """On disk, and over all hosts in their memory while it is written."""

    @property
    def peak_phase(self) -> str:
        """The fullest phase."""
        return max(self.memory, key=lambda phase: sum(self.memory[phase].values()))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        arithmetic = self._run_summary()
        width = max(map(len, arithmetic)) + 2
        lines = [
            f"{name if i == 0 else '':<{width}}{line}"
            for name, text in arithmetic.items()
            for i, line in enumerate(text.splitlines())
        ]
        return "\n".join([*lines, "", *format_memory_table(self.memory), "", *self._memory_summary()])

    def _run_summary(self) -> dict[str, str]:
        axes = ", ".join(f"{axis} {size}" for axis, size in self.mesh.items())
        held_out = f"\nheld out: {self.num_held_out:,}" if self.num_held_out else ""
        return {
            "run": f"{self.directory}: {self.steps:,} steps, {self.optimizer_steps:,} optimizer steps, "
            f"{'at least ' if self.max_rounds_per_step > 1 else ''}{self.epochs_of_data:.3g} epochs of the data"
            + "".join(f"\n{note}" for note in self.notes),
            "model": f"{self.model} ({self.family}): {self.num_parameters:,} parameters, computing in {self.dtype}"
            + (f"; critic: {self.num_critic_parameters:,}" if self.num_critic_parameters else "")
            + (f"; reward model: {self.num_reward_model_parameters:,}" if self.num_reward_model_parameters else ""),
            "mesh": f"{self.num_devices} x {self.device_kind} on {self.num_hosts} host(s): {axes}"
            + (" (pretended: none of it is there)" if self.is_pretended else ""),
            "data": f"{self.data}{held_out}",
            "step": f"{self.prompts_per_step:,} prompts, {self.samples_per_step:,} samples; "
            f"{self.prompt_tokens_per_step:,} prompt tokens on average, at most "
            f"{self.max_completion_tokens_per_step:,} completion tokens, {self.max_flops_per_step / 1e12:.3g} TFLOP",
            **({"rollout": self._format_rollout(self.rollout)} if self.rollout else {}),
            **({"evaluation": _format_generation(self.evaluation)} if self.evaluation else {}),
            **({"score reward": _format_micro_batches(self.reward_model)} if self.reward_model else {}),
            **{f"score {role}": _format_micro_batches(batches) for role, batches in self.score.items()},
            "update": f"{self.mini_batches_per_step * self.epochs_per_step} optimizer steps (mini-batches "
            f"{self.mini_batches_per_step} x epochs {self.epochs_per_step}), each {_format_micro_batches(self.update)}",
            **({"critic": f"as many, each {_format_micro_batches(self.critic_update)}"} if self.critic_update else {}),
        }

    def _format_rollout(self, sizes: Mapping[str, int]) -> str:
        ahead = f"\nall the time, at most {self.max_staleness} steps ahead of training" if self.max_staleness else ""
        return _format_generation(sizes) + ahead

    def _memory_advice(self) -> str:
        critic = [self.critic_update] if self.critic_update else []
        asked = [self.reward_model] if self.reward_model else []
        by_phase = {"update": [self.update], "critic": critic, "score": self.score.values(), "reward": asked}
        passes = by_phase.get(self.peak_phase, [])
        packed = all(micro_batches.packed for micro_batches in passes)
        ways_out = MEMORY_ADVICE if self.rollout else MEMORY_ADVICE | REPLAY_MEMORY_ADVICE
        return ways_out[self.peak_phase].format(knob="max_tokens_per_device" if packed else "rows_per_device")

    def _memory_summary(self) -> list[str]:
        lines = []
        if self.available_bytes is None:
            lines.append(f"peak {_format_size(self.peak_bytes)} on each device; how much it has is not known")
        else:
            share = self.peak_bytes / self.available_bytes
            lines.append(
                f"peak {_format_size(self.peak_bytes)} on each device, {share:.0%} of its "
                f"{_format_size(self.available_bytes)}"
            )
            if share > 1:
                lines.append(f"this does not fit: {self._memory_advice()}, or spread the weights with mesh.shape")
        size = _format_size(self.checkpoint_bytes)
        return [*lines, f"a checkpoint takes {size} on disk, and as much of the hosts' memory while it is written"]


def _format_generation(sizes: Mapping[str, int]) -> str:
    return (
        f"{sizes['num_prompts']:,} prompts of {sizes['prompt_length']:,} tokens, {sizes['num_rows']:,} rows with a "
        f"cache of {sizes['cache_length']:,}, on each host"
    )


def _format_micro_batches(batches: MicroBatchSummary) -> str:
    return (
        f"at most {batches.count:,} micro-batches of {batches.rows_per_device:,} rows a device, "
        f"{batches.tokens_per_row:,} tokens a row"
    )


def _format_size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"


def make_dry_run_report(
    resolved: Resolved, *, resume: Resume, replay_request: ReplayRequest | None = None
) -> DryRunReport | None:
    """What `grpo train` would do, from shapes and files' headers. Compiles nothing, loads no weights, writes nothing.

    None on all hosts but the first, which tells for all of them.

    Args:
        asked: to learn from samples of files.

    Raises:
        InputError: whatever would keep the run from starting. Checkpoints to resume from are not opened.
    """
    with prepare_run(resolved, resume=resume, replay_request=replay_request) as launch:
        learning, read = launch.make_learner_group(), launch.inputs
        shapes = compute_step_shapes(
            launch.session,
            learning,
            read.prompts,
            read.eval_prompts,
            read.reward_model,
            generates=read.replay is None,
        )
        return build_report(launch, learning, shapes) if jax.process_index() == 0 else None


def build_report(launch: RunSetup, learning: LearnerGroup, shapes: StepShapes) -> DryRunReport:
    """The figures of a launch that has passed its checks."""
    settings, session, prompts = launch.resolved.settings, launch.session, launch.inputs.prompts
    definition, mesh = session.model_spec.policy_definition, session.mesh
    prompts_per_step = settings.rollout.prompts_per_step * num_hosts(mesh)
    samples_per_step = prompts_per_step * settings.rollout.group_size
    mean_prompt = sum(len(prompt.token_ids) for prompt in prompts) / len(prompts)
    prompt_tokens = round(samples_per_step * mean_prompt)
    completion_tokens = samples_per_step * settings.rollout.max_new_tokens
    tokens = TokenCounts(prompt_tokens, completion_tokens)
    steps, replay = launch.steps, launch.inputs.replay
    warmup = settings.critic.warmup_steps if settings.has_critic else 0
    reward_model = launch.inputs.reward_model
    memory = memory_by_phase(session, learning, shapes, reward_model)
    return DryRunReport(
        directory=str(launch.run.path),
        notes=(*launch_notices(launch.resolved), *launch.notes),
        model=settings.model.path,
        family=session.model_spec.architecture.family,
        dtype=settings.model.dtype,
        num_parameters=definition.num_parameters,
        num_trained_parameters=definition.num_trainable,
        mesh=dict(mesh.shape),
        device_kind=device_kind(mesh.devices.flat[0]),
        num_devices=mesh.size,
        num_hosts=num_hosts(mesh),
        is_pretended=simulated_slice() is not None,
        data=launch.inputs.data_report,
        num_prompts=len(prompts),
        num_held_out=len(launch.inputs.eval_prompts),
        steps=len(steps),
        optimizer_steps=sum(step > warmup for step in steps) * settings.updates_per_step,
        epochs_of_data=len(steps) * prompts_per_step / len(prompts),
        max_rounds_per_step=learning.max_rounds,
        prompts_per_step=prompts_per_step,
        samples_per_step=samples_per_step,
        prompt_tokens_per_step=prompt_tokens,
        max_completion_tokens_per_step=completion_tokens,
        max_flops_per_step=make_step_flops(settings, session).total(
            sampled=NO_TOKENS if replay else tokens, learned=tokens
        ),
        mini_batches_per_step=settings.num_mini_batches,
        epochs_per_step=settings.algorithm.epochs,
        max_staleness=settings.rollout.max_staleness,
        rollout=None if shapes.rollout is None else shapes.rollout._asdict(),
        evaluation=None if shapes.evaluation is None else shapes.evaluation._asdict(),
        score={
            role: _summarize_plan(session, plan, learning.score_batchers[role]) for role, plan in shapes.scores.items()
        },
        update=_summarize_plan(session, shapes.update, learning.policy.updater.micro_batcher),
        critic_update=(
            _summarize_plan(session, shapes.critic_update, learning.critic.updater.micro_batcher)
            if shapes.critic_update and learning.critic
            else None
        ),
        num_critic_parameters=session.critic.spec.definition.num_parameters if session.critic else 0,
        reward_model=(
            _summarize_plan(session, shapes.reward, make_reward_batcher(settings, reward_model.architecture))
            if shapes.reward and reward_model
            else None
        ),
        num_reward_model_parameters=reward_model.definition.num_parameters if reward_model else 0,
        memory=memory,
        peak_bytes=max(sum(held.values()) for held in memory.values()),
        available_bytes=device_memory_bytes(),
        checkpoint_bytes=state_bytes(learning),
    )


def _summarize_plan(session: Session, plan: MicroBatchPlan, micro_batcher: MicroBatcher) -> MicroBatchSummary:
    return MicroBatchSummary(
        count=len(plan.micro_batches),
        packed=isinstance(micro_batcher, PackedRowBatcher),
        rows_per_device=rows_per_device(session, plan),
        tokens_per_row=largest_micro_batch(plan).shape.num_tokens,
    )
