"""Estimates of the temporary buffers of a step's programs, from shapes: nothing is compiled.

The factors are what the CPU's compiler reserved for networks of 0.2 million to 3 billion weights
(`scripts/bench/memory_estimate.py`); other backends fuse more or less.
`grpo inspect-mesh --compile` shows exact figures.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape
from app.batching.row_logprobs import row_logprobs
from app.batching.row_values import row_values
from app.batching.token_batch import TokenBatch
from app.mesh.axis_rules import partition_spec, sharding_tree
from app.mesh.placement import abstract_arrays, bytes_per_device, num_local_row_shards, num_row_shards
from app.model.architecture import Architecture
from app.model.decoder import Decoder, DecoderDefinition, Params, ValueDecoder
from app.model.kv_cache import decode_dims
from app.model.lora import LoRAConfig, combine_params
from app.rollout.batch_engine import BatchShape, Footprint
from app.runtime.session import Session
from settings.schema.lora import Quantization
from settings.schema.settings import ScoredRole

MemoryBreakdown = dict[str, int]
"""Name of a buffer -> its bytes on each device; the names are those of `app.preflight.memory.MEMORY_LABELS`."""

TEMPORARY_BUFFERS = ("whole_weights", "logits", "logits_work", "activations")
"""Buffers of a program in addition to its arguments, its outputs and its gradients."""

BLOCK_BACKWARD_FACTOR = 1.25
"""Working memory of a block's backward pass, relative to the residuals of its forward pass."""
BLOCK_FORWARD_FACTOR = 0.5
"""Working memory of a block's forward pass that keeps no residuals, relative to the same."""
SAMPLING_LOGITS_FACTOR = 4
"""Arrays as large as the logits that sampling needs for its noise."""


class NetworkSpec(Protocol):
    """A network that is not loaded."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def definition(self) -> DecoderDefinition: ...


class NetworkPass(NamedTuple):
    """What decides the residuals of a pass over a network."""

    architecture: Architecture
    dtype: str
    logits_chunk: int | None
    """Tokens of the LM head at a time; None for a value head."""
    lora: LoRAConfig | None = None
    quantization: Quantization | None = None

    @classmethod
    def of_policy(cls, session: Session) -> NetworkPass:
        """Returns the pass of the policy with its adapters."""
        model, definition = session.settings.model, session.model_spec.policy_definition
        return cls(definition.architecture, model.dtype, model.logits_chunk, definition.lora, definition.quantization)

    @classmethod
    def of_values(cls, session: Session, architecture: Architecture) -> NetworkPass:
        """Returns the pass of a critic or of a reward model."""
        return cls(architecture, session.settings.model.dtype, None)


def generation_memory(session: Session, shape: BatchShape, footprint: Footprint) -> MemoryBreakdown:
    """Returns the bytes of a rollout or an evaluation on each device of the mesh that holds its slots."""
    if not footprint.slots:
        # Ray workers generate on other machines; only the weights for them are here.
        return {"decode_weights": bytes_per_device(footprint.weights)}
    mesh: Mesh = jax.tree.leaves(footprint.slots)[0].sharding.mesh
    prompt_cache = bytes_per_device(footprint.prompts)
    rows = -(-shape.num_prompts // num_local_row_shards(mesh))
    logits = _logits_bytes(session, mesh, num_decode_rows(session, footprint), num_tokens=1)
    _, layer = gathered_weight_bytes(session.model_spec.definition, mesh)
    prefill = _block_residual_bytes(NetworkPass.of_policy(session), rows, RowShape(shape.prompt_length, 1))
    return {
        "decode_weights": bytes_per_device(footprint.weights),
        "whole_weights": _is_quantized(session) * layer,
        "prompt_cache": prompt_cache,
        "kv_cache": bytes_per_device(footprint.slots),
        "logits": logits,
        "logits_work": SAMPLING_LOGITS_FACTOR * logits,
        # The prefill holds its keys and values a second time, before they are laid out as a cache.
        "activations": prefill + prompt_cache,
    }


def num_decode_rows(session: Session, footprint: Footprint) -> int:
    """Returns the rows that decode at once: those of one batch over all hosts, or of all workers of a device."""
    return sum(layer.keys.shape[0] for layer in footprint.slots) // session.model_spec.architecture.num_layers


def scoring_memory(session: Session, role: ScoredRole, plan: MicroBatchPlan) -> MemoryBreakdown:
    """Returns the buffers of a role's forward pass, at its blocks or at its head, whichever needs more."""
    if role == "critic":
        assert session.critic is not None
        network, spec = NetworkPass.of_values(session, session.critic.spec.architecture), session.critic.spec
    else:
        network, spec = NetworkPass.of_policy(session), session.model_spec
    return peak_memory(_pass_points(session, network, spec.definition, plan, gradient_copies=None))


def reward_model_memory(session: Session, model: NetworkSpec, plan: MicroBatchPlan) -> MemoryBreakdown:
    """Returns the buffers of the reward model's forward pass."""
    block = _block_residual_bytes(NetworkPass.of_values(session, model.architecture), *_row_shape(session, plan))
    return {"activations": int(BLOCK_FORWARD_FACTOR * block)}


def update_memory_points(session: Session, plan: MicroBatchPlan) -> tuple[MemoryBreakdown, ...]:
    """Returns the buffers of the policy's gradients in the backward pass of one block, and of the head."""
    network = NetworkPass.of_policy(session)
    # Devices that add up their gradients hold them twice. What adapters add is left out.
    copies = 0 if network.lora is not None else 1 + (num_row_shards(session.mesh) > 1)
    return _pass_points(session, network, session.model_spec.definition, plan, gradient_copies=copies)


def critic_update_memory_points(session: Session, plan: MicroBatchPlan) -> tuple[MemoryBreakdown, ...]:
    """Returns the same for the critic, whose head is one number wide."""
    assert session.critic is not None
    network, copies = NetworkPass.of_values(session, session.critic.spec.architecture), num_row_shards(session.mesh) > 1
    return _pass_points(session, network, session.critic.spec.definition, plan, gradient_copies=1 + copies)


def _pass_points(
    session: Session,
    network: NetworkPass,
    stored: DecoderDefinition,
    plan: MicroBatchPlan,
    *,
    gradient_copies: int | None,
) -> tuple[MemoryBreakdown, ...]:
    """Returns the buffers at a block and, if the network has one, at the LM head.

    Args:
        stored: the weights without adapters.
        gradient_copies: copies of a weight's gradient in a backward pass; None for a forward pass.
    """
    rows, shape = _row_shape(session, plan)
    table, layer = gathered_weight_bytes(stored, session.mesh)
    copies = (session.mesh.shape["fsdp"] > 1) + (gradient_copies or 0)
    kept = 0 if gradient_copies is None else residual_bytes(network, rows, shape, remat=session.settings.model.remat)
    factor = BLOCK_FORWARD_FACTOR if gradient_copies is None else BLOCK_BACKWARD_FACTOR
    block = int(factor * _block_residual_bytes(network, rows, shape))
    at_block = {"whole_weights": max(copies, network.quantization is not None) * layer, "activations": kept + block}
    if network.logits_chunk is None:
        return (at_block,)
    num_tokens = min(max(1, network.logits_chunk // rows), shape.num_completion_tokens)
    chunk = _logits_bytes(session, session.mesh, rows * num_row_shards(session.mesh), num_tokens=num_tokens)
    if gradient_copies is None:
        kept = rows * shape.num_tokens * network.architecture.model_dim * jnp.dtype(network.dtype).itemsize
    return at_block, {"logits": chunk, "logits_work": chunk, "whole_weights": copies * table, "activations": kept}


def peak_memory(points: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    """Returns the breakdown with the most bytes."""
    return max(points, key=lambda breakdown: sum(breakdown.values()))


def gathered_weight_bytes(definition: DecoderDefinition, mesh: Mesh) -> tuple[int, int]:
    """Returns the bytes of the LM head's table and of one block while in use: float32, gathered along fsdp.

    A quantized block dequantizes a few kernels at a time, so its bytes are an upper bound.
    """
    dims = jax.tree.map(lambda _, dims: decode_dims(dims, "gathered"), definition.shapes, definition.dims)
    whole = abstract_arrays(definition.shapes, sharding_tree(mesh, definition.shapes, dims))
    table = whole.get("output", whole["embedding"])
    return bytes_per_device(table), bytes_per_device(whole["blocks"]) // definition.architecture.num_layers


def _is_quantized(session: Session) -> bool:
    return session.model_spec.policy_definition.quantization is not None


def largest_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """Returns the micro-batch with the most token positions."""
    return max(plan.micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)


def rows_per_device(session: Session, plan: MicroBatchPlan) -> int:
    """Returns the rows of the largest micro-batch on each device."""
    return len(largest_micro_batch(plan).rows) // num_local_row_shards(session.mesh)


def _row_shape(session: Session, plan: MicroBatchPlan) -> tuple[int, RowShape]:
    return rows_per_device(session, plan), largest_micro_batch(plan).shape


def _logits_bytes(session: Session, mesh: Mesh, num_rows: int, *, num_tokens: int) -> int:
    shape = (num_rows, num_tokens, session.model_spec.architecture.vocab_size)
    sharding = NamedSharding(mesh, partition_spec(("rows", "tokens", "vocab"), shape, mesh))
    return bytes_per_device(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


def _block_residual_bytes(network: NetworkPass, rows: int, shape: RowShape) -> int:
    return residual_bytes(network, rows, shape, remat="none") // network.architecture.num_layers


@functools.cache
def residual_bytes(network: NetworkPass, rows: int, shape: RowShape, *, remat: str) -> int:
    """Returns the bytes that differentiation keeps from the forward pass of `rows` rows, without the weights.

    Traced, not computed: the difference to twice as many rows. The compiler may keep something else, and needs working
    memory; tp makes it smaller.
    """
    network_class = ValueDecoder if network.logits_chunk is None else Decoder
    definition = DecoderDefinition.create(
        network.architecture, network_class, lora=network.lora, quantization=network.quantization
    )
    dtype = jnp.dtype(network.dtype)

    def forward(params: Params, batch: TokenBatch) -> Any:
        decoder = definition.bind(params)
        if network.logits_chunk is None:
            return row_values(decoder, batch, dtype=dtype, remat=remat)
        return row_logprobs(
            decoder, batch, temperature=1.0, dtype=dtype, remat=remat, logits_chunk=network.logits_chunk
        )

    def kept(rows: int) -> int:
        tokens = jax.ShapeDtypeStruct((rows, shape.num_tokens), jnp.int32)
        targets = jax.ShapeDtypeStruct((rows, shape.num_completion_tokens), jnp.int32)
        mask = jax.ShapeDtypeStruct(targets.shape, jnp.bool)
        batch = TokenBatch(tokens, tokens, tokens, tokens, logits_indices=targets, targets=targets, loss_mask=mask)

        def backward(params: Params, frozen: Params, batch: TokenBatch) -> Callable[..., Any]:
            return jax.vjp(lambda params: forward(combine_params(params, frozen), batch), params)[1]

        parts = definition.trainable(definition.shapes), definition.frozen(definition.shapes)
        residuals = jax.tree.leaves(jax.eval_shape(backward, *parts, batch))
        return sum(x.size * x.dtype.itemsize for x in residuals)

    return kept(2 * rows) - kept(rows)
