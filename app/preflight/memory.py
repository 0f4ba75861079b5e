"""Bytes on each device in each phase of a step, from shapes: nothing is loaded and nothing compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
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
from app.preflight.tables import format_mebibytes, format_table
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
    "whole_weights": "weights gathered for use *",
    "logits": "logits of a chunk",
    "logits_work": "work on these logits *",
    "activations": "activations *",
    "checkpoint": "checkpoint being written *",
}
"""Name of a buffer -> its line in the table, in order. Starred lines depend on the compiler and are estimates."""


def format_memory_table(memory: Mapping[str, MemoryBreakdown]) -> list[str]:
    """Returns a line for each kind of buffer and a column for each phase."""
    rows = [
        [label, *(format_mebibytes(breakdown.get(name)) for breakdown in memory.values())]
        for name, label in MEMORY_LABELS.items()
        if any(breakdown.get(name) for breakdown in memory.values())
    ]
    total = ["in all", *(format_mebibytes(sum(breakdown.values())) for breakdown in memory.values())]
    table = format_table(["MiB on each device", *memory], [*rows, total])
    return [*table, "* estimated: the compiler may need more or less; all other lines follow from shapes"]


def peak_phase(memory: Mapping[str, MemoryBreakdown]) -> str:
    """Returns the phase that needs the most memory."""
    return max(memory, key=lambda phase: sum(memory[phase].values()))


@dataclass(frozen=True)
class StepShapes:
    """Shapes of a step's programs at the longest prompt and completion, from the functions that shape real steps."""

    rollout: BatchShape | None
    """Shape of the rollout; None if samples come from files."""
    evaluation: BatchShape | None
    scores: dict[ScoredRole, MicroBatchPlan]
    """Plan of each role for the samples of one optimizer step; all hosts have the same shapes."""
    update: MicroBatchPlan
    """Plan of one optimizer step of the policy."""
    critic_update: MicroBatchPlan | None
    reward: MicroBatchPlan | None = None
    """Plan of the reward model, for conversations as long as the policy's samples."""


def compute_step_shapes(
    session: Session,
    learning: LearnerGroup,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    reward_model: NetworkSpec | None = None,
    *,
    generates: bool = True,
) -> StepShapes:
    """Returns the shapes of a run over these prompts, the same on every host.

    Args:
        generates: False if samples come from files.
    """
    settings, rollout = session.settings, session.settings.rollout
    longest_prompt, longest_held_out = (
        max((len(prompt.token_ids) for prompt in group), default=0) for group in (prompts, held_out)
    )
    mini_batch = largest_mini_batch(session, longest_prompt=longest_prompt)
    shape = evaluation = reward = critic_update = None
    if generates:
        shape = session.rollout_shape(
            num_prompts=rollout.prompts_per_step, group_size=rollout.group_size, longest_prompt=longest_prompt
        )
    if held_out:
        num_prompts = evaluation_batch_size(settings, -(-len(held_out) // num_hosts(session.mesh)))
        evaluation = session.evaluation_shape(num_prompts=num_prompts, longest_prompt=longest_held_out)
    if learning.critic:
        critic_update = plan_for_equal_hosts(session, learning.critic.updater.micro_batcher, mini_batch)
    if reward_model is not None:
        # The score is read at one more token, after the last.
        lengths = _longest_lengths(
            session, longest_prompt, rollout.max_new_tokens + 1, num_prompts=rollout.prompts_per_step
        )
        reward = plan_for_equal_hosts(session, make_reward_batcher(settings, reward_model.architecture), lengths)
    return StepShapes(
        rollout=shape,
        evaluation=evaluation,
        scores={
            role: plan_for_equal_hosts(session, batcher, mini_batch)
            for role, batcher in learning.score_batchers.items()
        },
        update=plan_for_equal_hosts(session, learning.policy.updater.micro_batcher, mini_batch),
        critic_update=critic_update,
        reward=reward,
    )


def largest_mini_batch(session: Session, *, longest_prompt: int) -> SequenceLengths:
    """Returns the lengths of a host's samples of an optimizer step, each as long as possible."""
    settings = session.settings
    num_prompts = settings.rollout.prompts_per_step // settings.num_mini_batches
    return _longest_lengths(session, longest_prompt, settings.rollout.max_new_tokens, num_prompts=num_prompts)


def _longest_lengths(session: Session, prompt: int, completion: int, *, num_prompts: int) -> SequenceLengths:
    groups = np.arange(num_prompts).repeat(session.settings.rollout.group_size)
    return SequenceLengths(*(np.full_like(groups, length) for length in (prompt, completion)), prompt_indices=groups)


def plan_for_equal_hosts(session: Session, micro_batcher: MicroBatcher, lengths: SequenceLengths) -> MicroBatchPlan:
    """Returns the plan of one host if every host has samples of these lengths."""
    mesh = session.mesh
    return micro_batcher.plan([lengths] * num_hosts(mesh), devices_per_host=num_local_row_shards(mesh))[0]


def memory_by_phase(
    session: Session, learning: LearnerGroup, shapes: StepShapes, reward_model: NetworkSpec | None = None
) -> dict[str, MemoryBreakdown]:
    """Returns the bytes on each device in each phase that the run has.

    The phases are `rollout`, `evaluation`, `reward`, `score`, `critic` and `update`.
    """
    always, reference = network_bytes(session, learning, reward_model), _reference_bytes(session, learning)
    if _is_on_cpu(session):
        # The copy that is written while steps go on is in the host's memory, which is also the device's.
        always["checkpoint"] = state_bytes(learning) // jax.device_count()
    rollout: MemoryBreakdown = {}
    if shapes.rollout is not None:
        rollout = generation_memory(session, shapes.rollout, session.rollout_footprint(shapes.rollout))
    if rollout and session.generates_async:
        # Workers keep their slots during the other phases, and receive the next weights before they drop the last.
        always, rollout = _sum_breakdowns(always, {**rollout, "decode_weights": 2 * rollout["decode_weights"]}), {}
    phases: dict[str, MemoryBreakdown] = {} if shapes.rollout is None else {"rollout": {**always, **rollout}}
    if shapes.evaluation is not None:
        footprint = session.evaluation_footprint(shapes.evaluation)
        phases["evaluation"] = _sum_breakdowns(always, generation_memory(session, shapes.evaluation, footprint))
    if reward_model is not None and shapes.reward is not None:
        # The sampler's weights stay between the rounds of a group filter.
        kept = {name: size for name, size in rollout.items() if name == "decode_weights" and learning.max_rounds > 1}
        scoring = reward_model_memory(session, reward_model, shapes.reward)
        phases["reward"] = _sum_breakdowns({**always, **kept}, scoring)
    if shapes.scores:
        scoring = peak_memory([scoring_memory(session, role, plan) for role, plan in shapes.scores.items()])
        phases["score"] = _sum_breakdowns({**always, **reference}, scoring)
    if shapes.critic_update is not None and learning.critic:
        points = critic_update_memory_points(session, shapes.critic_update)
        phases["critic"] = _sum_breakdowns({**always, **_gradient_bytes(learning.critic)}, peak_memory(points))
    points = update_memory_points(session, shapes.update)
    phases["update"] = _sum_breakdowns({**always, **_gradient_bytes(learning.policy)}, peak_memory(points))
    return phases


def network_bytes(session: Session, learning: LearnerGroup, reward_model: NetworkSpec | None = None) -> MemoryBreakdown:
    """Returns the bytes on each device of the weights and moments that stay from the first step to the last."""
    sizes: MemoryBreakdown = {}
    sizes["weights"], sizes["optimizer"] = _learner_bytes(learning.policy)
    if learning.critic:
        sizes["critic"], sizes["critic_optimizer"] = _learner_bytes(learning.critic)
    if reward_model is not None:
        definition = reward_model.definition
        sizes["reward_model"] = bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))
    # On a CPU, offloading the reference moves it to the same memory.
    if not session.settings.offloads_reference or _is_on_cpu(session):
        sizes |= _reference_bytes(session, learning)
    return sizes


def _reference_bytes(session: Session, learning: LearnerGroup) -> MemoryBreakdown:
    """Returns the bytes of the reference policy's copy of the weights; empty if it needs none."""
    has_copy = "reference" in session.settings.scored_roles and session.model_spec.policy_definition.lora is None
    return {"reference": _learner_bytes(learning.policy)[0]} if has_copy else {}


def _is_on_cpu(session: Session) -> bool:
    return device_platform(session.mesh.devices.flat[0]) == "cpu"


def _sum_breakdowns(first: MemoryBreakdown, second: MemoryBreakdown) -> MemoryBreakdown:
    return dict(Counter(first) + Counter(second))


def _learner_bytes(learner: Learner) -> tuple[int, int]:
    """Returns the bytes of a network's weights, frozen ones included, and of the rest of its training state."""
    state = abstract_arrays(learner.shapes, learner.shardings)
    trained = bytes_per_device(state.params)
    return trained + bytes_per_device(learner.frozen_shapes), bytes_per_device(state) - trained


def _gradient_bytes(learner: Learner) -> MemoryBreakdown:
    trained = bytes_per_device(abstract_arrays(learner.shapes, learner.shardings).params)
    return {"gradients": trained, "micro_batch_gradients": trained}


def state_bytes(learning: LearnerGroup) -> int:
    """Returns the bytes of the whole training state over all devices, which is the size of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learning.shapes))
