"""What each phase of a step holds on a device, known from shapes: nothing is loaded and nothing compiled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array

from app.batching.micro_batches import Cutter
from app.batching.pack import TokenBatch
from app.batching.plan import Lengths, MicroBatch, Plan, RowShape
from app.batching.row_logprobs import row_logprobs
from app.batching.row_values import row_values
from app.flow import Prompt
from app.mesh.axis_rules import partition_spec
from app.mesh.placement import abstract, bytes_per_device, num_local_row_shards, num_row_shards
from app.mesh.topology import num_hosts, platform_of
from app.policy.architecture import Architecture
from app.policy.decoder import DecoderDefinition, Params
from app.rollout.engine import BatchShape, Footprint
from app.training.evaluate import evaluation_batch
from app.training.reward_role import wire_reward
from app.training.session import Session
from app.training.wiring import Learner, Learning
from settings.schema import ScoredRole

Held = dict[str, int]
"""Name of what is held -> its bytes on each device."""

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
    "logits": "logits of a chunk",
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

    rollout: BatchShape
    evaluation: BatchShape | None
    scores: dict[ScoredRole, Plan]
    """By role, of the samples of one optimizer step; each host's has the same shapes."""
    update: Plan
    """Of one optimizer step of the policy."""
    critic_update: Plan | None
    reward: Plan | None = None
    """Of the reward model, were its conversations as long as the policy's samples."""


class Network(Protocol):
    """A network that is not loaded."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def definition(self) -> DecoderDefinition: ...


def shapes_of(
    session: Session,
    learning: Learning,
    prompts: Sequence[Prompt],
    held_out: Sequence[Prompt],
    reward_model: Network | None = None,
) -> Shapes:
    """The shapes of a run over these prompts, alike on every host."""
    settings, rollout = session.settings, session.settings.rollout
    mini_batch = fullest_mini_batch(session, longest_prompt=longest(prompts))
    reward = None
    if reward_model is not None:
        # One token more, behind the last, which the score is read at.
        read = _fullest(session, longest(prompts), rollout.max_new_tokens + 1, num_prompts=rollout.prompts_per_step)
        reward = plan_of(session, wire_reward(settings, reward_model.architecture), read)
    share_of_host = held_out[: max(len(held_out) // num_hosts(session.mesh), 1)]
    return Shapes(
        rollout=session.rollout_shape(
            num_prompts=rollout.prompts_per_step, group_size=rollout.group_size, longest_prompt=longest(prompts)
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
    weights, moments = _of_learner(learning.policy)
    always = {"weights": weights, "optimizer": moments}
    if learning.critic:
        always["critic"], always["critic_optimizer"] = _of_learner(learning.critic)
    if reward_model is not None:
        definition = reward_model.definition
        always["reward_model"] = bytes_per_device(abstract(definition.shapes, definition.shardings(session.mesh)))
    on_cpu = platform_of(session.mesh.devices.flat[0]) == "cpu"
    if on_cpu:
        # It is copied into the host's memory, which here is the device's, and written while steps go on.
        always["checkpoint"] = state_bytes(learning) // jax.device_count()
    reference = {"reference": weights} if "reference" in session.settings.scored_roles else {}
    # On a CPU it waits in the same memory.
    if not session.settings.score.reference.offload or on_cpu:
        always |= reference
    rollout = _generating(session, shapes.rollout, session.rollout_footprint(shapes.rollout))
    if session.runs_ahead:
        # Workers hold their slots while others work, and have the next weights before they drop the last.
        always, rollout = _together(always, {**rollout, "decode_weights": 2 * rollout["decode_weights"]}), {}
    phases: dict[str, Held] = {"rollout": {**always, **rollout}}
    if shapes.evaluation is not None:
        generating = _generating(session, shapes.evaluation, session.evaluation_footprint(shapes.evaluation))
        phases["evaluation"] = _together(always, generating)
    if reward_model is not None and shapes.reward is not None:
        rows, shape = rows_per_device(session, shapes.reward), fullest_of(shapes.reward).shape
        # Between the rounds of a filter the weights of the sampler stay.
        kept = {name: size for name, size in rollout.items() if name == "decode_weights" and learning.max_rounds > 1}
        read = {"activations": saved_by_reward_model(session, reward_model, rows, shape)}
        phases["reward"] = _together({**always, **kept}, read)
    if shapes.scores:
        passes = [_scoring(session, role, plan) for role, plan in shapes.scores.items()]
        phases["score"] = _together({**always, **reference}, max(passes, key=lambda held: sum(held.values())))
    if shapes.critic_update is not None:
        gradients = _gradients(always["critic"])
        phases["critic"] = _together({**always, **gradients}, updating_critic(session, shapes.critic_update))
    phases["update"] = _together({**always, **_gradients(weights)}, updating(session, shapes.update))
    return phases


def _together(held: Held, other: Held) -> Held:
    return dict(Counter(held) + Counter(other))


def _of_learner(learner: Learner) -> tuple[int, int]:
    """Bytes of a network's weights, and of all else in its state."""
    state = abstract(learner.shapes, learner.shardings)
    weights = bytes_per_device(state.params)
    return weights, bytes_per_device(state) - weights


def _gradients(weights: int) -> Held:
    return {"gradients": weights, "micro_batch_gradients": weights}


def state_bytes(learning: Learning) -> int:
    """The whole training state, over all devices: what a checkpoint takes."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(learning.shapes))


def _generating(session: Session, shape: BatchShape, footprint: Footprint) -> Held:
    rows = -(-shape.num_prompts // num_local_row_shards(session.mesh))
    return {
        "decode_weights": bytes_per_device(footprint.weights),
        "prompt_cache": bytes_per_device(footprint.prompts),
        "kv_cache": bytes_per_device(footprint.slots),
        "logits": _logits(session, shape.num_rows * num_hosts(session.engine.mesh), num_tokens=1),
        "activations": _of_one_block(session, rows, RowShape(shape.prompt_length, num_completion_tokens=1)),
    }


def _scoring(session: Session, role: ScoredRole, plan: Plan) -> Held:
    rows, shape = rows_per_device(session, plan), fullest_of(plan).shape
    if role == "critic":
        return {"activations": _of_one_critic_block(session, rows, shape)}
    return {"logits": _chunk(session, rows, shape), "activations": _of_one_block(session, rows, shape)}


def updating(session: Session, plan: Plan) -> Held:
    rows, shape = rows_per_device(session, plan), fullest_of(plan).shape
    kept = saved_bytes(session, rows, shape, remat=session.settings.model.remat)
    # The backward pass works on one block at a time, computed again or not.
    return {"logits": _chunk(session, rows, shape), "activations": kept + _of_one_block(session, rows, shape)}


def updating_critic(session: Session, plan: Plan) -> Held:
    rows, shape = rows_per_device(session, plan), fullest_of(plan).shape
    kept = saved_by_critic(session, rows, shape, remat=session.settings.model.remat)
    return {"activations": kept + _of_one_critic_block(session, rows, shape)}


def fullest_of(plan: Plan) -> MicroBatch:
    """The micro-batch with the most token positions."""
    return max(plan.micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)


def rows_per_device(session: Session, plan: Plan) -> int:
    """Rows of the fullest micro-batch on each device."""
    return len(fullest_of(plan).rows) // num_local_row_shards(session.mesh)


def _chunk(session: Session, rows: int, shape: RowShape) -> int:
    of_a_row = max(1, session.settings.model.logits_chunk // rows)
    num_tokens = min(of_a_row, shape.num_completion_tokens)
    return _logits(session, rows * num_row_shards(session.mesh), num_tokens=num_tokens)


def _logits(session: Session, num_rows: int, *, num_tokens: int) -> int:
    shape = (num_rows, num_tokens, session.input.architecture.vocab_size)
    sharding = NamedSharding(session.mesh, partition_spec(("rows", "tokens", "vocab"), shape, session.mesh))
    return bytes_per_device(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


def _of_one_block(session: Session, rows: int, shape: RowShape) -> int:
    return saved_bytes(session, rows, shape, remat="none") // session.input.architecture.num_layers


def _of_one_critic_block(session: Session, rows: int, shape: RowShape) -> int:
    num_layers = session.architecture_of("critic").num_layers
    return saved_by_critic(session, rows, shape, remat="none") // num_layers


def saved_bytes(session: Session, rows: int, shape: RowShape, *, remat: str) -> int:
    """What differentiation keeps from the policy's forward for the backward pass of `rows` rows; see `_saved`."""
    definition, model = session.input.definition, session.settings.model

    def forward(params: Params, batch: TokenBatch) -> tuple[Array, Array]:
        return row_logprobs(
            definition.bind(params),
            batch,
            temperature=1.0,
            dtype=jnp.dtype(model.dtype),
            remat=remat,
            logits_chunk=model.logits_chunk,
        )

    return _saved(forward, definition.shapes, rows, shape)


def saved_by_critic(session: Session, rows: int, shape: RowShape, *, remat: str) -> int:
    """The same for the critic."""
    assert session.critic is not None
    definition, dtype = session.critic.input.definition, jnp.dtype(session.settings.model.dtype)

    def forward(params: Params, batch: TokenBatch) -> Array:
        return row_values(definition.bind(params), batch, dtype=dtype, remat=remat)

    return _saved(forward, definition.shapes, rows, shape)


def saved_by_reward_model(session: Session, model: Network, rows: int, shape: RowShape) -> int:
    """The same for one block of the reward model, which is never trained."""
    dtype = jnp.dtype(session.settings.model.dtype)

    def forward(params: Params, batch: TokenBatch) -> Array:
        return row_values(model.definition.bind(params), batch, dtype=dtype, remat="none")

    return _saved(forward, model.definition.shapes, rows, shape) // model.architecture.num_layers


def _saved(forward: Callable[[Params, TokenBatch], Any], weights: Params, rows: int, shape: RowShape) -> int:
    """Bytes of residuals, the weights left out.

    Traced, not computed: what twice as many rows would keep more. The compiler may keep some of it differently,
    and needs room to work in; split over tp it is less.
    """

    def kept(rows: int) -> int:
        tokens = jax.ShapeDtypeStruct((rows, shape.num_tokens), jnp.int32)
        targets = jax.ShapeDtypeStruct((rows, shape.num_completion_tokens), jnp.int32)
        mask = jax.ShapeDtypeStruct(targets.shape, jnp.bool)
        batch = TokenBatch(tokens, tokens, tokens, tokens, score_index=targets, targets=targets, mask=mask)

        def backward(params: Params, batch: TokenBatch) -> Callable[..., Any]:
            return jax.vjp(lambda params: forward(params, batch), params)[1]

        residuals = jax.tree.leaves(jax.eval_shape(backward, weights, batch))
        return sum(x.size * x.dtype.itemsize for x in residuals)

    return kept(2 * rows) - kept(rows)
