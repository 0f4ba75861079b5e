"""What each phase of a step holds on a device, known from shapes: nothing is loaded and nothing compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from app.batching.micro_batch_plan import MicroBatchPlan, SequenceLengths
from app.batching.micro_batcher import MicroBatcher
from app.evaluation.evaluator import evaluation_batch_size
from app.mesh.placement import abstract_arrays, bytes_per_device, num_local_row_shards
from app.mesh.topology import device_platform, num_hosts
from app.preflight.activation_memory import (
    MemoryBreakdown,
    NetworkSpec,
    critic_update_memory_points,
    generation_memory,
    peak_memory,
    reward_model_memory,
    scoring_memory,
    update_memory_points,
)
from app.records.sample import Prompt
from app.rollout.batch_engine import BatchShape
from app.runtime.reward_model import make_reward_batcher
from app.runtime.session import Session
from app.training.learner import Learner, LearnerGroup
from settings.schema.settings import ScoredRole

MEMORY_LABELS = {
    "weights": "weights",
    "optimizer": "optimizer moments",
    "critic": "weights of the critic",
    "critic_optimizer": "moments of the critic",
    "reference": "reference weights",
    "reward_model": "weights of the reward model",
    "decode_weights": "decoding copy of the weights",
    "prompt_cache": "KV cache of the prompts",
    "kv_cache": "KV cache of the samples",
    "gradients": "gradients, summed",
    "micro_batch_gradients": "gradients of a micro-batch *",
    "whole_weights": "weights made whole for use *",
    "logits": "logits of a chunk",
    "logits_work": "work on these logits *",
    "activations": "activations *",
    "checkpoint": "checkpoint being written *",
}
"""What may be held, in the order of the table. The starred ones are up to the compiler: they are estimated."""


def format_memory_table(memory: Mapping[str, MemoryBreakdown]) -> list[str]:
    """A line for each thing that is held, a column for each phase."""
    phases = list(memory)
    rows = {label: [memory[phase].get(name) for phase in phases] for name, label in MEMORY_LABELS.items()}
    lines = [_format_row("MiB on each device", phases)]
    lines += [_format_row(label, map(_format_mebibytes, sizes)) for label, sizes in rows.items() if any(sizes)]
    lines.append(_format_row("in all", [_format_mebibytes(sum(held.values())) for held in memory.values()]))
    return [*lines, "* estimated: the compiler may need more or less; all else follows from shapes"]


def _format_row(label: str, cells: Iterable[str]) -> str:
    return f"{label:<32}" + "".join(f"{cell:>12}" for cell in cells)


def _format_mebibytes(size: int | None) -> str:
    return f"{size / 2**20:,.1f}" if size else "-"


def longest_prompt_length(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.token_ids) for prompt in prompts)


@dataclass(frozen=True)
class StepShapes:
    """Shapes of a step's programs at the longest prompt and completion, from the functions that shape the real ones."""

    rollout: BatchShape | None
    """None where samples come from files."""
    evaluation: BatchShape | None
    scores: dict[ScoredRole, MicroBatchPlan]
    """By role, of the samples of one optimizer step; each host's has the same shapes."""
    update: MicroBatchPlan
    """Of one optimizer step of the policy."""
    critic_update: MicroBatchPlan | None
    reward: MicroBatchPlan | None = None
    """Of the reward model, were its conversations as long as the policy's samples."""


def compute_step_shapes(
    session: Session,
    learning: LearnerGroup,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    reward_model: NetworkSpec | None = None,
    *,
    generates: bool = True,
) -> StepShapes:
    """The shapes of a run over these prompts, alike on every host.

    Args:
        generates: False where samples come from files.
    """
    settings, rollout = session.settings, session.settings.rollout
    mini_batch = largest_mini_batch(session, longest_prompt=longest_prompt_length(prompts))
    reward = None
    if reward_model is not None:
        # One token more, behind the last, which the score is read at.
        read = _longest_lengths(
            session, longest_prompt_length(prompts), rollout.max_new_tokens + 1, num_prompts=rollout.prompts_per_step
        )
        reward = plan_for_equal_hosts(session, make_reward_batcher(settings, reward_model.architecture), read)
    share_of_host = -(-len(held_out) // num_hosts(session.mesh))
    return StepShapes(
        rollout=(
            session.rollout_shape(
                num_prompts=rollout.prompts_per_step,
                group_size=rollout.group_size,
                longest_prompt=longest_prompt_length(prompts),
            )
            if generates
            else None
        ),
        evaluation=(
            session.evaluation_shape(
                num_prompts=evaluation_batch_size(settings, share_of_host),
                longest_prompt=longest_prompt_length(held_out),
            )
            if held_out
            else None
        ),
        scores={role: plan_for_equal_hosts(session, cut, mini_batch) for role, cut in learning.score_batchers.items()},
        update=plan_for_equal_hosts(session, learning.policy.updater.micro_batcher, mini_batch),
        critic_update=plan_for_equal_hosts(session, learning.critic.updater.micro_batcher, mini_batch)
        if learning.critic
        else None,
        reward=reward,
    )


def largest_mini_batch(session: Session, *, longest_prompt: int) -> SequenceLengths:
    """A host's samples of an optimizer step, each as long as can be."""
    settings = session.settings
    num_prompts = settings.rollout.prompts_per_step // settings.num_mini_batches
    return _longest_lengths(session, longest_prompt, settings.rollout.max_new_tokens, num_prompts=num_prompts)


def _longest_lengths(
    session: Session, prompt_length: int, completion_length: int, *, num_prompts: int
) -> SequenceLengths:
    groups = np.arange(num_prompts).repeat(session.settings.rollout.group_size)
    return SequenceLengths(
        *(np.full_like(groups, length) for length in (prompt_length, completion_length)), prompt_indices=groups
    )


def plan_for_equal_hosts(session: Session, micro_batcher: MicroBatcher, lengths: SequenceLengths) -> MicroBatchPlan:
    """How a host cuts such samples, where every host has the like."""
    mesh = session.mesh
    return micro_batcher.plan([lengths] * num_hosts(mesh), devices_per_host=num_local_row_shards(mesh))[0]


def memory_by_phase(
    session: Session, learning: LearnerGroup, shapes: StepShapes, reward_model: NetworkSpec | None = None
) -> dict[str, MemoryBreakdown]:
    """Bytes on each device in each phase that the run has.

    `rollout`, `evaluation`, `reward`, `score`, `critic` and `update`.
    """
    always, reference = network_bytes(session, learning, reward_model), _reference_bytes(session, learning)
    if _is_on_cpu(session):
        # It is copied into the host's memory, which here is the device's, and written while steps go on.
        always["checkpoint"] = state_bytes(learning) // jax.device_count()
    rollout: MemoryBreakdown = {}
    if shapes.rollout is not None:
        rollout = generation_memory(session, shapes.rollout, session.rollout_footprint(shapes.rollout))
    if rollout and session.generates_async:
        # Workers hold their slots while others work, and have the next weights before they drop the last.
        always, rollout = _sum_breakdowns(always, {**rollout, "decode_weights": 2 * rollout["decode_weights"]}), {}
    phases: dict[str, MemoryBreakdown] = {} if shapes.rollout is None else {"rollout": {**always, **rollout}}
    if shapes.evaluation is not None:
        footprint = session.evaluation_footprint(shapes.evaluation)
        phases["evaluation"] = _sum_breakdowns(always, generation_memory(session, shapes.evaluation, footprint))
    if reward_model is not None and shapes.reward is not None:
        # Between the rounds of a filter the weights of the sampler stay.
        kept = {name: size for name, size in rollout.items() if name == "decode_weights" and learning.max_rounds > 1}
        phases["reward"] = _sum_breakdowns(
            {**always, **kept}, reward_model_memory(session, reward_model, shapes.reward)
        )
    if shapes.scores:
        passes = [scoring_memory(session, role, plan) for role, plan in shapes.scores.items()]
        phases["score"] = _sum_breakdowns({**always, **reference}, max(passes, key=lambda held: sum(held.values())))
    if shapes.critic_update is not None and learning.critic:
        gradients = _gradient_bytes(learning.critic)
        phases["critic"] = _sum_breakdowns(
            {**always, **gradients}, peak_memory(critic_update_memory_points(session, shapes.critic_update))
        )
    phases["update"] = _sum_breakdowns(
        {**always, **_gradient_bytes(learning.policy)}, peak_memory(update_memory_points(session, shapes.update))
    )
    return phases


def network_bytes(session: Session, learning: LearnerGroup, reward_model: NetworkSpec | None = None) -> MemoryBreakdown:
    """Bytes on each device of what lies there from the first step to the last: weights and moments."""
    held: MemoryBreakdown = {}
    held["weights"], held["optimizer"] = _learner_bytes(learning.policy)
    if learning.critic:
        held["critic"], held["critic_optimizer"] = _learner_bytes(learning.critic)
    if reward_model is not None:
        definition = reward_model.definition
        held["reward_model"] = bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))
    # On a CPU it waits in the same memory.
    if not session.settings.offloads_reference or _is_on_cpu(session):
        held |= _reference_bytes(session, learning)
    return held


def _reference_bytes(session: Session, learning: LearnerGroup) -> MemoryBreakdown:
    """The copy of the weights that the reference policy needs; nothing where it needs none."""
    has_copy = "reference" in session.settings.scored_roles and session.model_spec.policy_definition.lora is None
    return {"reference": _learner_bytes(learning.policy)[0]} if has_copy else {}


def _is_on_cpu(session: Session) -> bool:
    return device_platform(session.mesh.devices.flat[0]) == "cpu"


def _sum_breakdowns(first: MemoryBreakdown, second: MemoryBreakdown) -> MemoryBreakdown:
    return dict(Counter(first) + Counter(second))


def _learner_bytes(learner: Learner) -> tuple[int, int]:
    """Bytes of a network's weights, those that stay as they are among them, and of all else in its state."""
    state = abstract_arrays(learner.shapes, learner.shardings)
    trained = bytes_per_device(state.params)
    return trained + bytes_per_device(learner.frozen_shapes), bytes_per_device(state) - trained


def _gradient_bytes(learner: Learner) -> MemoryBreakdown:
    trained = bytes_per_device(abstract_arrays(learner.shapes, learner.shardings).params)
    return {"gradients": trained, "micro_batch_gradients": trained}


def state_bytes(learning: LearnerGroup) -> int:
    """The whole training state, over all devices: what a checkpoint takes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learning.shapes))
