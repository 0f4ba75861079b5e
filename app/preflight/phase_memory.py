"""Computes the exact bytes of the arrays on each device in each phase of a step, from their shapes alone.

Temporaries of programs depend on the compiler; `app.preflight.compiled_programs` adds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, SequenceLengths
from app.batching.micro_batcher import MicroBatcher
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_platform
from app.mesh.placement import bytes_per_device, num_row_shards
from app.records.sample import Prompt
from app.records.text_format import format_bytes, format_table
from app.rollout.engine.shapes import BatchShape, Footprint
from app.runtime.model_spec import NetworkSpec
from app.runtime.reward_model import make_reward_batcher
from app.runtime.session import Session
from app.training.learner import LearnerGroup
from app.training.network_memory import MemoryBreakdown, network_bytes, reference_bytes
from settings.schema.algorithm import ScoredRole

MEMORY_LABELS = {
    "weights": "weights",
    "optimizer": "optimizer moments",
    "critic": "weights of the critic",
    "critic_optimizer": "moments of the critic",
    "reference": "reference weights",
    "reward_model": "weights of the reward model",
    "decode_weights": "decoding copy of the weights",
    "kv_cache": "KV cache of the samples",
    "gradients": "gradients, summed",
    "checkpoint": "checkpoint being written",
    "temporaries": "temporaries of a program *",
    "padding": "padding of its arguments *",
}
"""Maps the name of a buffer to the label of its line in the memory table, in the order of the lines."""

GENERATION_ADVICE = (
    "lower rollout.prompts_per_step, rollout.group_size or rollout.max_new_tokens, set fewer rollout.slots or "
    "rollout.kv_blocks, or rollout.mesh: tp=N"
)
MEMORY_ADVICE = {
    "publish": "set a smaller share of rollout.devices, or rollout.mesh: tp=N",
    "rollout": GENERATION_ADVICE,
    "evaluation": GENERATION_ADVICE,
    "reward": "lower score.reward.max_tokens_per_device or rows_per_device",
    "score": "lower score.{role}.max_tokens_per_device or rows_per_device, or (not for the critic) model.logits_chunk",
    "critic": "lower critic.max_tokens_per_device or rows_per_device, set model.remat: block",
    "update": "lower algorithm.max_tokens_per_device or rows_per_device, set model.remat: block",
}
"""Maps a phase to advice on how to reduce its memory. `{role}` is the role whose scoring program does not fit."""


@dataclass(frozen=True)
class StepOutline:
    """A run, and the shapes of one training step in which every prompt and completion is as long as possible."""

    session: Session
    learning: LearnerGroup
    reward_model: NetworkSpec | None
    rollout: BatchShape | None
    """Shape of the rollout's decode batch; None if samples come from files."""
    evaluation: BatchShape | None
    scores: dict[ScoredRole, MicroBatchPlan]
    """Micro-batches in which each role scores the samples of one optimizer step; all hosts have the same shapes."""
    update: MicroBatchPlan
    """Micro-batches of one optimizer step of the policy."""
    critic_update: MicroBatchPlan | None
    longest_prompt: int
    """Length in tokens of the longest prompt, which all plans assume for every sample."""
    reward: MicroBatchPlan | None
    """Micro-batches of the reward model, whose conversations are assumed to be as long as the policy's samples."""


def outline_step(
    session: Session,
    learning: LearnerGroup,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    reward_model: NetworkSpec | None,
) -> StepOutline:
    """Returns the outline of a step whose prompts all have the length of the longest; it is equal on all hosts."""
    settings, rollout = session.settings, session.settings.rollout
    longest_prompt = max((len(prompt.token_ids) for prompt in prompts), default=0)

    def plan(batcher: MicroBatcher, num_prompts: int, completion: int = rollout.max_new_tokens) -> MicroBatchPlan:
        """Returns the plan of process 0 for `num_prompts` groups of the longest samples on each host."""
        hosts = num_hosts(session.mesh)
        indices = np.arange(num_prompts * hosts).repeat(rollout.group_size)
        lengths = [np.full_like(indices, length) for length in (longest_prompt, completion)]
        all_rows = batcher.plan(
            SequenceLengths(*lengths, prompt_keys=indices), num_devices=num_row_shards(session.mesh)
        )
        return all_rows.part(0, hosts)

    mini_batch = rollout.prompts_per_step // settings.num_mini_batches
    shape = evaluation = reward = critic_update = None
    if session.generates == "rollouts":
        shape = session.generator.engine.batch_shape
    if held_out:
        evaluation = session.evaluation_generator.engine.batch_shape
    if learning.critic:
        critic_update = plan(learning.critic.updater.micro_batcher, mini_batch)
    if reward_model is not None:
        # The score is read at an additional token after the last one.
        batcher = make_reward_batcher(settings, reward_model.architecture)
        reward = plan(batcher, rollout.prompts_per_step, rollout.max_new_tokens + 1)
    return StepOutline(
        session,
        learning,
        reward_model,
        rollout=shape,
        evaluation=evaluation,
        scores={role: plan(batcher, mini_batch) for role, batcher in learning.score_batchers.items()},
        update=plan(learning.policy.updater.micro_batcher, mini_batch),
        critic_update=critic_update,
        longest_prompt=longest_prompt,
        reward=reward,
    )


def memory_by_phase(step: StepOutline) -> dict[str, MemoryBreakdown]:
    """Returns the bytes of each buffer on a device, for each phase of a step.

    The phases are `rollout`, `evaluation`, `reward`, `score`, `critic`, `update` and `publish`, as far as the run has
    them. With `rollout.devices`, the rollout counts the devices that generate, and every other phase those that train.
    """
    session, learning = step.session, step.learning
    always = network_bytes(session.scoring, learning, step.reward_model)
    if device_platform(session.mesh.devices.flat[0]) == "cpu":
        # A checkpoint is written from a copy in host memory, which a CPU device shares.
        always["checkpoint"] = state_bytes(learning) // session.mesh.size
    rollout: MemoryBreakdown = {}
    phases: dict[str, MemoryBreakdown] = {}
    if step.rollout is not None:
        rollout = _generation_bytes(session.footprint(session.generator))
        if session.scoring.generation_devices:
            phases["rollout"], rollout = rollout, {}
        elif session.generates_async:
            # Workers keep their slots during the other phases.
            always, rollout = _sum_breakdowns(always, rollout), {}
        phases.setdefault("rollout", {**always, **rollout})
    if step.evaluation is not None:
        footprint = session.footprint(session.evaluation_generator)
        phases["evaluation"] = _sum_breakdowns(always, _generation_bytes(footprint))
    if step.reward is not None:
        # The sampler's weights stay between the rounds of a group filter.
        kept = {name: size for name, size in rollout.items() if name == "decode_weights" and learning.max_rounds > 1}
        phases["reward"] = {**always, **kept}
    if step.scores:
        phases["score"] = {**always, **reference_bytes(session.scoring)}
    for phase, learner in (("critic", learning.critic), ("update", learning.policy)):
        if learner is not None:
            phases[phase] = {**always, "gradients": bytes_per_device(learner.layout.params)}
    if session.scoring.generation_devices:
        weights = bytes_per_device(session.to_decode_weights.abstract_weights)
        phases["publish"] = _sum_breakdowns(always, {"decode_weights": weights})
    return phases


def _generation_bytes(footprint: Footprint) -> MemoryBreakdown:
    """Returns the bytes of the weights and the KV cache for generation; no KV cache if Ray workers generate."""
    return {"decode_weights": bytes_per_device(footprint.weights), "kv_cache": bytes_per_device(footprint.slots)}


def largest_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """Returns the micro-batch with the most token positions, including padding."""
    return max(plan.micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)


def _sum_breakdowns(first: MemoryBreakdown, second: MemoryBreakdown) -> MemoryBreakdown:
    return dict(Counter(first) + Counter(second))


def state_bytes(learning: LearnerGroup) -> int:
    """Returns the bytes of the training state over all devices, which is the size of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learning.layout))


def peak_phase(memory: Mapping[str, MemoryBreakdown]) -> str:
    """Returns the phase that needs the most memory."""
    return max(memory, key=lambda phase: sum(memory[phase].values()))


def format_memory_table(memory: Mapping[str, MemoryBreakdown]) -> str:
    """Returns a table with one line per buffer and one column per phase."""
    rows = [
        [label, *(format_bytes(size) if (size := phase.get(name)) else "-" for phase in memory.values())]
        for name, label in MEMORY_LABELS.items()
        if any(phase.get(name) for phase in memory.values())
    ]
    rows.append(["total", *(format_bytes(sum(phase.values())) for phase in memory.values())])
    counted = "without temporaries of programs, which --compile adds"
    if any("temporaries" in phase for phase in memory.values()):
        counted = "* reported by the compiler for the phase's largest program; all other lines follow from shapes"
    return f"{format_table(rows, header=['on each device', *memory])}\n{counted}"
