"""What each phase of a step holds on a device, known from shapes: nothing is loaded and nothing compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from app.batching.micro_batch_plan import Lengths, Plan
from app.batching.micro_batcher import Cutter
from app.evaluation.evaluator import evaluation_batch
from app.mesh.placement import abstract, bytes_per_device, num_local_row_shards
from app.mesh.topology import num_hosts, platform_of
from app.preflight.activation_memory import (
    Held,
    Network,
    critic_moments,
    fullest_moment,
    generating,
    reading,
    scoring,
    update_moments,
)
from app.records.sample import Prompt
from app.rollout.batch_engine import BatchShape
from app.runtime.reward_model import wire_reward
from app.runtime.session import Session
from app.training.learner import Learner, Learning
from settings.schema.settings import ScoredRole

LABELS = {
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


def memory_table(memory: Mapping[str, Held]) -> list[str]:
    """A line for each thing that is held, a column for each phase."""
    phases = list(memory)
    rows = {label: [memory[phase].get(name) for phase in phases] for name, label in LABELS.items()}
    lines = [_row("MiB on each device", phases)]
    lines += [_row(label, map(_mebibytes, sizes)) for label, sizes in rows.items() if any(sizes)]
    lines.append(_row("in all", [_mebibytes(sum(held.values())) for held in memory.values()]))
    return [*lines, "* estimated: the compiler may need more or less; all else follows from shapes"]


def _row(label: str, cells: Iterable[str]) -> str:
    return f"{label:<32}" + "".join(f"{cell:>12}" for cell in cells)


def _mebibytes(size: int | None) -> str:
    return f"{size / 2**20:,.1f}" if size else "-"


def longest(prompts: Sequence[Prompt]) -> int:
    """Tokens of the longest prompt."""
    return max(len(prompt.token_ids) for prompt in prompts)


@dataclass(frozen=True)
class Shapes:
    """Shapes of a step's programs at the longest prompt and completion, from the functions that shape the real ones."""

    rollout: BatchShape | None
    """None where samples come from files."""
    evaluation: BatchShape | None
    scores: dict[ScoredRole, Plan]
    """By role, of the samples of one optimizer step; each host's has the same shapes."""
    update: Plan
    """Of one optimizer step of the policy."""
    critic_update: Plan | None
    reward: Plan | None = None
    """Of the reward model, were its conversations as long as the policy's samples."""


def shapes_of(
    session: Session,
    learning: Learning,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    reward_model: Network | None = None,
    *,
    generates: bool = True,
) -> Shapes:
    """The shapes of a run over these prompts, alike on every host.

    Args:
        generates: False where samples come from files.
    """
    settings, rollout = session.settings, session.settings.rollout
    mini_batch = fullest_mini_batch(session, longest_prompt=longest(prompts))
    reward = None
    if reward_model is not None:
        # One token more, behind the last, which the score is read at.
        read = _fullest(session, longest(prompts), rollout.max_new_tokens + 1, num_prompts=rollout.prompts_per_step)
        reward = plan_of(session, wire_reward(settings, reward_model.architecture), read)
    share_of_host = -(-len(held_out) // num_hosts(session.mesh))
    return Shapes(
        rollout=(
            session.rollout_shape(
                num_prompts=rollout.prompts_per_step, group_size=rollout.group_size, longest_prompt=longest(prompts)
            )
            if generates
            else None
        ),
        evaluation=(
            session.evaluation_shape(
                num_prompts=evaluation_batch(settings, share_of_host), longest_prompt=longest(held_out)
            )
            if held_out
            else None
        ),
        scores={role: plan_of(session, cut, mini_batch) for role, cut in learning.cuts.items()},
        update=plan_of(session, learning.policy.updater.cut, mini_batch),
        critic_update=plan_of(session, learning.critic.updater.cut, mini_batch) if learning.critic else None,
        reward=reward,
    )


def fullest_mini_batch(session: Session, *, longest_prompt: int) -> Lengths:
    """A host's samples of an optimizer step, each as long as can be."""
    settings = session.settings
    num_prompts = settings.rollout.prompts_per_step // settings.num_mini_batches
    return _fullest(session, longest_prompt, settings.rollout.max_new_tokens, num_prompts=num_prompts)


def _fullest(session: Session, prompt: int, completion: int, *, num_prompts: int) -> Lengths:
    groups = np.arange(num_prompts).repeat(session.settings.rollout.group_size)
    return Lengths(*(np.full_like(groups, length) for length in (prompt, completion)), prompt_numbers=groups)


def plan_of(session: Session, cut: Cutter, lengths: Lengths) -> Plan:
    """How a host cuts such samples, where every host has the like."""
    mesh = session.mesh
    return cut.plan([lengths] * num_hosts(mesh), devices_per_host=num_local_row_shards(mesh))[0]


def memory_by_phase(
    session: Session, learning: Learning, shapes: Shapes, reward_model: Network | None = None
) -> dict[str, Held]:
    """Bytes on each device in each phase that the run has.

    `rollout`, `evaluation`, `reward`, `score`, `critic` and `update`.
    """
    always, reference = networks_held(session, learning, reward_model), _reference(session, learning)
    if _is_on_cpu(session):
        # It is copied into the host's memory, which here is the device's, and written while steps go on.
        always["checkpoint"] = state_bytes(learning) // jax.device_count()
    rollout: Held = {}
    if shapes.rollout is not None:
        rollout = generating(session, shapes.rollout, session.rollout_footprint(shapes.rollout))
    if rollout and session.runs_ahead:
        # Workers hold their slots while others work, and have the next weights before they drop the last.
        always, rollout = _together(always, {**rollout, "decode_weights": 2 * rollout["decode_weights"]}), {}
    phases: dict[str, Held] = {} if shapes.rollout is None else {"rollout": {**always, **rollout}}
    if shapes.evaluation is not None:
        footprint = session.evaluation_footprint(shapes.evaluation)
        phases["evaluation"] = _together(always, generating(session, shapes.evaluation, footprint))
    if reward_model is not None and shapes.reward is not None:
        # Between the rounds of a filter the weights of the sampler stay.
        kept = {name: size for name, size in rollout.items() if name == "decode_weights" and learning.max_rounds > 1}
        phases["reward"] = _together({**always, **kept}, reading(session, reward_model, shapes.reward))
    if shapes.scores:
        passes = [scoring(session, role, plan) for role, plan in shapes.scores.items()]
        phases["score"] = _together({**always, **reference}, max(passes, key=lambda held: sum(held.values())))
    if shapes.critic_update is not None and learning.critic:
        gradients = _gradients(learning.critic)
        phases["critic"] = _together(
            {**always, **gradients}, fullest_moment(critic_moments(session, shapes.critic_update))
        )
    phases["update"] = _together(
        {**always, **_gradients(learning.policy)}, fullest_moment(update_moments(session, shapes.update))
    )
    return phases


def networks_held(session: Session, learning: Learning, reward_model: Network | None = None) -> Held:
    """Bytes on each device of what lies there from the first step to the last: weights and moments."""
    held: Held = {}
    held["weights"], held["optimizer"] = _of_learner(learning.policy)
    if learning.critic:
        held["critic"], held["critic_optimizer"] = _of_learner(learning.critic)
    if reward_model is not None:
        definition = reward_model.definition
        held["reward_model"] = bytes_per_device(abstract(definition.shapes, definition.shardings(session.mesh)))
    # On a CPU it waits in the same memory.
    if not session.settings.offloads_reference or _is_on_cpu(session):
        held |= _reference(session, learning)
    return held


def _reference(session: Session, learning: Learning) -> Held:
    """The copy of the weights that the reference policy needs; nothing where it needs none."""
    has_copy = "reference" in session.settings.scored_roles and session.input.adapted.lora is None
    return {"reference": _of_learner(learning.policy)[0]} if has_copy else {}


def _is_on_cpu(session: Session) -> bool:
    return platform_of(session.mesh.devices.flat[0]) == "cpu"


def _together(held: Held, other: Held) -> Held:
    return dict(Counter(held) + Counter(other))


def _of_learner(learner: Learner) -> tuple[int, int]:
    """Bytes of a network's weights, those that stay as they are among them, and of all else in its state."""
    state = abstract(learner.shapes, learner.shardings)
    trained = bytes_per_device(state.params)
    return trained + bytes_per_device(learner.frozen), bytes_per_device(state) - trained


def _gradients(learner: Learner) -> Held:
    trained = bytes_per_device(abstract(learner.shapes, learner.shardings).params)
    return {"gradients": trained, "micro_batch_gradients": trained}


def state_bytes(learning: Learning) -> int:
    """The whole training state, over all devices: what a checkpoint takes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learning.shapes))
