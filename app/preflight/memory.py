"""Estimates the bytes on each device in each phase of a step from shapes, without loading or compiling anything.

The sizes of weights, moments, gradients and caches are exact. Activations follow a formula that ignores adapters,
extra norms, and fusions and copies by the compiler; `grpo inspect-mesh --compile` reports the compiler's sizes.
`scripts/bench/memory_estimate.py` compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, SequenceLengths
from app.batching.micro_batcher import MicroBatcher
from app.evaluation.evaluator import evaluation_batch_size
from app.mesh.axis_rules import partition_spec, sharding_tree
from app.mesh.device_mesh import num_hosts
from app.mesh.devices import device_platform
from app.mesh.placement import abstract_arrays, bytes_per_device, num_local_row_shards, num_row_shards
from app.model.architecture import Architecture
from app.model.decode_weights import decode_dims
from app.model.decoder import DecoderDefinition
from app.records.sample import Prompt
from app.records.text_format import format_bytes, format_table
from app.rollout.batch_engine import BatchShape, Footprint
from app.runtime.model_spec import CriticSpec, ModelSpec
from app.runtime.reward_model import RewardModelSpec, make_reward_batcher
from app.runtime.session import Session
from app.training.learner import Learner, LearnerGroup
from settings.schema.score import ScoredRole

MemoryBreakdown = dict[str, int]
"""Name of a buffer in `MEMORY_LABELS` -> its bytes on each device."""

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
"""Name of a buffer -> label of its line in the table, in order. Lines with a star are estimates."""

TEMPORARY_BUFFERS = ("whole_weights", "logits", "logits_work", "activations")
"""Buffers of a program other than its arguments, its outputs and its gradients."""

KEPT_NUMBERS = {"none": (6, 2, 3, 6), "minimal": (3, 1, 2, 2), "block": (1, 0, 0, 0)}
"""`model.remat` -> multiples of model_dim, query heads, kv heads and mlp_dim that a layer keeps per token for the
backward pass. They count the arrays kept by `jax.vjp`, within 5 % for Llama and Qwen2 in float32."""
BLOCK_BACKWARD_FACTOR = 1.25
"""Working memory of a block's backward pass, relative to the activations kept by the block without remat."""
BLOCK_FORWARD_FACTOR = 0.5
"""Working memory of a block in a pass without gradients, relative to the same activations."""
SAMPLING_LOGITS_FACTOR = 4
"""Number of arrays of the size of the logits that sampling needs for its noise."""


NetworkSpec = ModelSpec | CriticSpec | RewardModelSpec
"""Description of a network, without its weights."""


@dataclass(frozen=True)
class StepShapes:
    """Shapes of a step's programs for the longest prompt and completion, from the functions used in real steps."""

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

    def plan(batcher: MicroBatcher, num_prompts: int, completion: int = rollout.max_new_tokens) -> MicroBatchPlan:
        """Returns one host's plan, assuming that every host has only groups of the longest samples."""
        indices = np.arange(num_prompts).repeat(rollout.group_size)
        lengths = [np.full_like(indices, length) for length in (longest_prompt, completion)]
        all_hosts = [SequenceLengths(*lengths, prompt_indices=indices)] * num_hosts(session.mesh)
        return batcher.plan(all_hosts, devices_per_host=num_local_row_shards(session.mesh))[0]

    mini_batch = rollout.prompts_per_step // settings.num_mini_batches
    shape = evaluation = reward = critic_update = None
    if generates:
        shape = session.rollout_shape(
            num_prompts=rollout.prompts_per_step, group_size=rollout.group_size, longest_prompt=longest_prompt
        )
    if held_out:
        num_prompts = evaluation_batch_size(settings, -(-len(held_out) // num_hosts(session.mesh)))
        evaluation = session.evaluation_shape(num_prompts=num_prompts, longest_prompt=longest_held_out)
    if learning.critic:
        critic_update = plan(learning.critic.updater.micro_batcher, mini_batch)
    if reward_model is not None:
        # The score is read at one additional token, after the last.
        batcher = make_reward_batcher(settings, reward_model.architecture)
        reward = plan(batcher, rollout.prompts_per_step, rollout.max_new_tokens + 1)
    return StepShapes(
        rollout=shape,
        evaluation=evaluation,
        scores={role: plan(batcher, mini_batch) for role, batcher in learning.score_batchers.items()},
        update=plan(learning.policy.updater.micro_batcher, mini_batch),
        critic_update=critic_update,
        reward=reward,
    )


def memory_by_phase(
    session: Session, learning: LearnerGroup, shapes: StepShapes, reward_model: NetworkSpec | None = None
) -> dict[str, MemoryBreakdown]:
    """Returns the bytes on each device in each phase of the run.

    The phases are `rollout`, `evaluation`, `reward`, `score`, `critic` and `update`.
    """
    always, reference = network_bytes(session, learning, reward_model), _reference_bytes(session, learning)
    if device_platform(session.mesh.devices.flat[0]) == "cpu":
        # The copy written in the background is in the host's memory, which is also that of the device.
        always["checkpoint"] = state_bytes(learning) // jax.device_count()
    rollout: MemoryBreakdown = {}
    if shapes.rollout is not None:
        rollout = generation_memory(session, shapes.rollout, session.rollout_footprint(shapes.rollout))
    if rollout and session.generates_async:
        # Workers keep their slots during the other phases, and receive new weights before dropping the old ones.
        always, rollout = _sum_breakdowns(always, {**rollout, "decode_weights": 2 * rollout["decode_weights"]}), {}
    phases: dict[str, MemoryBreakdown] = {} if shapes.rollout is None else {"rollout": {**always, **rollout}}
    if shapes.evaluation is not None:
        footprint = session.evaluation_footprint(shapes.evaluation)
        phases["evaluation"] = _sum_breakdowns(always, generation_memory(session, shapes.evaluation, footprint))
    if reward_model is not None and shapes.reward is not None:
        # The sampler's weights stay between the rounds of a group filter.
        kept = {name: size for name, size in rollout.items() if name == "decode_weights" and learning.max_rounds > 1}
        scoring = pass_memory(session, reward_model, shapes.reward, has_lm_head=False)
        phases["reward"] = _sum_breakdowns({**always, **kept}, scoring)
    policy, critic = session.model_spec, session.critic and session.critic.spec
    if shapes.scores:
        scoring = max(
            (
                pass_memory(session, policy, plan, has_lm_head=True)
                if critic is None or role != "critic"
                else pass_memory(session, critic, plan, has_lm_head=False)
                for role, plan in shapes.scores.items()
            ),
            key=_total,
        )
        phases["score"] = _sum_breakdowns({**always, **reference}, scoring)
    # Devices that sum their gradients hold them twice. Gradients of adapters are ignored.
    copies = 1 + (num_row_shards(session.mesh) > 1)
    if shapes.critic_update is not None and learning.critic and critic is not None:
        buffers = pass_memory(session, critic, shapes.critic_update, has_lm_head=False, gradient_copies=copies)
        phases["critic"] = _sum_breakdowns({**always, **_gradient_bytes(learning.critic)}, buffers)
    copies = 0 if policy.policy_definition.lora is not None else copies
    buffers = pass_memory(session, policy, shapes.update, has_lm_head=True, gradient_copies=copies)
    phases["update"] = _sum_breakdowns({**always, **_gradient_bytes(learning.policy)}, buffers)
    return phases


def generation_memory(session: Session, shape: BatchShape, footprint: Footprint) -> MemoryBreakdown:
    """Returns the buffers of a rollout or an evaluation on each device that holds its slots."""
    if not footprint.slots:
        # Ray workers generate on other machines; this one holds only the weights for them.
        return {"decode_weights": bytes_per_device(footprint.weights)}
    mesh: Mesh = jax.tree.leaves(footprint.slots)[0].sharding.mesh
    prompt_cache = bytes_per_device(footprint.prompts)
    prefill_tokens = -(-shape.num_prompts // num_local_row_shards(mesh)) * shape.prompt_length
    # The rows decoded at once: those of one batch over all hosts, or of all workers of a device.
    num_rows = sum(layer.keys.shape[0] for layer in footprint.slots) // session.model_spec.architecture.num_layers
    logits = _logits_bytes(session, mesh, num_rows, num_tokens=1)
    _, layer = _gathered_weight_bytes(session.model_spec.definition, mesh)
    return {
        "decode_weights": bytes_per_device(footprint.weights),
        "whole_weights": (session.model_spec.policy_definition.quantization is not None) * layer,
        "prompt_cache": prompt_cache,
        "kv_cache": bytes_per_device(footprint.slots),
        "logits": logits,
        "logits_work": SAMPLING_LOGITS_FACTOR * logits,
        # The prefill holds a second copy of its keys and values before they are laid out as a cache.
        "activations": layer_bytes(session, session.model_spec.architecture, prefill_tokens) + prompt_cache,
    }


def pass_memory(
    session: Session,
    network: NetworkSpec,
    plan: MicroBatchPlan,
    *,
    has_lm_head: bool,
    gradient_copies: int | None = None,
) -> MemoryBreakdown:
    """Returns the buffers of a pass through a network, at a block or at the LM head, whichever needs more.

    Args:
        gradient_copies: copies of a weight's gradient in a backward pass; None for a pass without gradients.
    """
    settings, architecture, rows = session.settings.model, network.architecture, max_rows_on_device(session, plan)
    shape, has_gradients = largest_micro_batch(plan).shape, gradient_copies is not None
    table, layer = _gathered_weight_bytes(network.definition, session.mesh)
    copies = (session.mesh.shape["fsdp"] > 1) + (gradient_copies or 0)
    num_tokens = rows * shape.num_tokens
    block, kept = layer_bytes(session, architecture, num_tokens), 0
    if has_gradients:
        kept = architecture.num_layers * layer_bytes(session, architecture, num_tokens, remat=settings.remat)
    is_quantized = has_lm_head and session.model_spec.policy_definition.quantization is not None
    at_block = {
        "whole_weights": max(copies, is_quantized) * layer,
        "activations": kept + int((BLOCK_BACKWARD_FACTOR if has_gradients else BLOCK_FORWARD_FACTOR) * block),
    }
    if not has_lm_head:
        return at_block
    chunk = min(max(1, settings.logits_chunk // rows), shape.num_completion_tokens)
    logits = _logits_bytes(session, session.mesh, rows * num_row_shards(session.mesh), num_tokens=chunk)
    hidden = num_tokens * architecture.model_dim * jnp.dtype(settings.dtype).itemsize
    at_head = {
        **{"logits": logits, "logits_work": logits},
        **{"whole_weights": copies * table, "activations": kept or hidden},
    }
    return max(at_block, at_head, key=_total)


def layer_bytes(session: Session, architecture: Architecture, num_tokens: int, *, remat: str = "none") -> int:
    """Returns the bytes kept by the forward pass of one layer for its backward pass, without the weights.

        num_tokens * itemsize * (a model_dim + b query_heads head_dim + c kv_heads head_dim + d mlp_dim)

    The multiples a to d are those of `KEPT_NUMBERS`. Splitting over tp, which reduces the bytes, is ignored.
    """
    heads = architecture.num_query_heads * architecture.head_dim, architecture.num_kv_heads * architecture.head_dim
    sizes = (architecture.model_dim, *heads, architecture.mlp_dim)
    numbers = sum(multiple * size for multiple, size in zip(KEPT_NUMBERS[remat], sizes, strict=True))
    return num_tokens * numbers * jnp.dtype(session.settings.model.dtype).itemsize


def _gathered_weight_bytes(definition: DecoderDefinition, mesh: Mesh) -> tuple[int, int]:
    """Returns the bytes of the LM head's table and of one block while in use: float32, gathered along fsdp.

    A quantized block dequantizes a few kernels at a time, so its bytes are an upper bound.
    """
    dims = jax.tree.map(lambda _, dims: decode_dims(dims, "gathered"), definition.shapes, definition.dims)
    whole = abstract_arrays(definition.shapes, sharding_tree(mesh, definition.shapes, dims))
    table = whole.get("output", whole["embedding"])
    return bytes_per_device(table), bytes_per_device(whole["blocks"]) // definition.architecture.num_layers


def _logits_bytes(session: Session, mesh: Mesh, num_rows: int, *, num_tokens: int) -> int:
    shape = (num_rows, num_tokens, session.model_spec.architecture.vocab_size)
    sharding = NamedSharding(mesh, partition_spec(("rows", "tokens", "vocab"), shape, mesh))
    return bytes_per_device(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


def largest_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """Returns the micro-batch with the most token positions."""
    return max(plan.micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)


def max_rows_on_device(session: Session, plan: MicroBatchPlan) -> int:
    """Returns the rows of the largest micro-batch on each device."""
    return len(largest_micro_batch(plan).rows) // num_local_row_shards(session.mesh)


def network_bytes(session: Session, learning: LearnerGroup, reward_model: NetworkSpec | None = None) -> MemoryBreakdown:
    """Returns the bytes on each device of the weights and moments kept throughout the run."""
    sizes: MemoryBreakdown = {}
    sizes["weights"], sizes["optimizer"] = _learner_bytes(learning.policy)
    if learning.critic:
        sizes["critic"], sizes["critic_optimizer"] = _learner_bytes(learning.critic)
    if reward_model is not None:
        definition = reward_model.definition
        sizes["reward_model"] = bytes_per_device(abstract_arrays(definition.shapes, definition.shardings(session.mesh)))
    # On a CPU, an offloaded reference stays in the same memory.
    if not session.settings.offloads_reference or device_platform(session.mesh.devices.flat[0]) == "cpu":
        sizes |= _reference_bytes(session, learning)
    return sizes


def _reference_bytes(session: Session, learning: LearnerGroup) -> MemoryBreakdown:
    """Returns the bytes of the reference policy's own copy of the weights; empty if it needs none."""
    has_copy = "reference" in session.settings.scored_roles and session.model_spec.policy_definition.lora is None
    return {"reference": _learner_bytes(learning.policy)[0]} if has_copy else {}


def _total(breakdown: MemoryBreakdown) -> int:
    return sum(breakdown.values())


def _sum_breakdowns(first: MemoryBreakdown, second: MemoryBreakdown) -> MemoryBreakdown:
    return dict(Counter(first) + Counter(second))


def _learner_bytes(learner: Learner) -> tuple[int, int]:
    """Returns the bytes of a network's weights, including frozen ones, and of the rest of its training state."""
    state = abstract_arrays(learner.shapes, learner.shardings)
    trained = bytes_per_device(state.params)
    return trained + bytes_per_device(learner.frozen_shapes), bytes_per_device(state) - trained


def _gradient_bytes(learner: Learner) -> MemoryBreakdown:
    trained = bytes_per_device(abstract_arrays(learner.shapes, learner.shardings).params)
    return {"gradients": trained, "micro_batch_gradients": trained}


def state_bytes(learning: LearnerGroup) -> int:
    """Returns the bytes of the whole training state over all devices, which is the size of a checkpoint."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learning.shapes))


def peak_phase(memory: Mapping[str, MemoryBreakdown]) -> str:
    """Returns the phase that needs the most memory."""
    return max(memory, key=lambda phase: _total(memory[phase]))


def format_memory_table(memory: Mapping[str, MemoryBreakdown]) -> str:
    """Returns a table with one line per buffer and one column per phase."""
    rows = [
        [label, *(format_bytes(size) if (size := phase.get(name)) else "-" for phase in memory.values())]
        for name, label in MEMORY_LABELS.items()
        if any(phase.get(name) for phase in memory.values())
    ]
    rows.append(["total", *(format_bytes(_total(phase)) for phase in memory.values())])
    table = format_table(rows, header=["on each device", *memory])
    return f"{table}\n* estimate: the compiler may need more or less; all other lines follow from shapes"
