"""What a step's programs work in, beside what they are given and what they give: from shapes, mostly estimated.

Nothing is compiled. The factors below are how much the CPU's compiler reserved for networks of 0.2 million to 3 billion
weights (`scripts/bench/memory_estimate.py`); another backend fuses more or less.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape
from app.batching.pack import TokenBatch
from app.batching.row_logprobs import row_logprobs
from app.batching.row_values import row_values
from app.mesh.axis_rules import partition_spec, sharding_tree
from app.mesh.placement import abstract_arrays, bytes_per_device, num_local_row_shards, num_row_shards
from app.model.architecture import Architecture
from app.model.decoder import DecoderDefinition, Params, ValueDecoder
from app.model.kv_cache import decode_dims
from app.model.lora import LoRAConfig, combine_params
from app.rollout.batch_engine import BatchShape, Footprint
from app.runtime.session import Session
from settings.schema.lora import Quantization
from settings.schema.settings import ScoredRole

MemoryBreakdown = dict[str, int]
"""Name of what is held -> its bytes on each device; names are those of `app.preflight.memory.LABELS`."""

TEMPORARY_BUFFERS = ("whole_weights", "logits", "logits_work", "activations")
"""What a program holds beside its arguments and outputs, gradients apart."""

BLOCK_BACKWARD_FACTOR = 1.25
"""Room that the backward pass of a block needs, over what differentiation keeps of its forward."""
BLOCK_FORWARD_FACTOR = 0.5
"""Room that the forward pass of a block needs where nothing is kept, over the same."""
SAMPLING_LOGITS_FACTOR = 4
"""Arrays as large as the logits that drawing from them needs: noise, and how it is made."""


class NetworkSpec(Protocol):
    """A network that is not loaded."""

    @property
    def architecture(self) -> Architecture: ...

    @property
    def definition(self) -> DecoderDefinition: ...


def generation_memory(session: Session, shape: BatchShape, footprint: Footprint) -> MemoryBreakdown:
    """Of a rollout or an evaluation, on the mesh that its slots lie on."""
    if not footprint.slots:
        # Others generate, and only the weights for them are here.
        return {"decode_weights": bytes_per_device(footprint.weights)}
    mesh: Mesh = jax.tree.leaves(footprint.slots)[0].sharding.mesh
    prompt_cache = bytes_per_device(footprint.prompts)
    rows = -(-shape.num_prompts // num_local_row_shards(mesh))
    logits = _logits_bytes(session, mesh, num_decode_rows(session, footprint), num_tokens=1)
    _, layer = gathered_weight_bytes(session.model_spec.definition, mesh)
    return {
        "decode_weights": bytes_per_device(footprint.weights),
        "whole_weights": _is_quantized(session) * layer,
        "prompt_cache": prompt_cache,
        "kv_cache": bytes_per_device(footprint.slots),
        "logits": logits,
        "logits_work": SAMPLING_LOGITS_FACTOR * logits,
        # The prefill has its keys and values once more, before they are laid out as a cache.
        "activations": _block_residual_bytes(session, rows, RowShape(shape.prompt_length, 1)) + prompt_cache,
    }


def num_decode_rows(session: Session, footprint: Footprint) -> int:
    """Rows that draw at once: of one batch over all its hosts, or of all workers that share a device."""
    return sum(layer.keys.shape[0] for layer in footprint.slots) // session.model_spec.architecture.num_layers


def scoring_memory(session: Session, role: ScoredRole, plan: MicroBatchPlan) -> MemoryBreakdown:
    """Of a forward pass: at its blocks or at its head, whichever needs more."""
    rows, shape = rows_per_device(session, plan), largest_micro_batch(plan).shape
    is_split = session.mesh.shape["fsdp"] > 1
    if role == "critic":
        assert session.critic is not None
        _, layer = gathered_weight_bytes(session.critic.spec.definition, session.mesh)
        of_block = _critic_block_residual_bytes(session, rows, shape)
        return {"whole_weights": is_split * layer, "activations": int(BLOCK_FORWARD_FACTOR * of_block)}
    table, layer = gathered_weight_bytes(session.model_spec.definition, session.mesh)
    chunk, hidden = _logits_chunk_bytes(session, rows, shape), _hidden_bytes(session, rows, shape)
    of_block = int(BLOCK_FORWARD_FACTOR * _block_residual_bytes(session, rows, shape))
    in_use = (is_split or _is_quantized(session)) * layer
    at_blocks = {"whole_weights": in_use, "activations": of_block}
    at_head = {"logits": chunk, "logits_work": chunk, "whole_weights": is_split * table, "activations": hidden}
    return peak_memory((at_blocks, at_head))


def reward_model_memory(session: Session, model: NetworkSpec, plan: MicroBatchPlan) -> MemoryBreakdown:
    """Of the reward model's forward pass."""
    rows, shape = rows_per_device(session, plan), largest_micro_batch(plan).shape
    of_block = reward_model_residual_bytes(session, model, rows, shape)
    return {"activations": int(BLOCK_FORWARD_FACTOR * of_block)}


def update_memory_points(session: Session, plan: MicroBatchPlan) -> tuple[MemoryBreakdown, ...]:
    """In the backward pass of one block, and of the head."""
    rows, shape = rows_per_device(session, plan), largest_micro_batch(plan).shape
    kept = policy_residual_bytes(session, rows, shape, remat=session.settings.model.remat)
    adapted = session.model_spec.policy_definition
    table, layer = gathered_weight_bytes(session.model_spec.definition, session.mesh)
    chunk, copies = (
        _logits_chunk_bytes(session, rows, shape),
        _num_gathered_copies(session.mesh, trained=adapted.lora is None),
    )
    of_block = int(BLOCK_BACKWARD_FACTOR * _block_residual_bytes(session, rows, shape))
    in_use = max(copies, _is_quantized(session)) * layer
    return (
        {"whole_weights": in_use, "activations": kept + of_block},
        {"logits": chunk, "logits_work": chunk, "whole_weights": copies * table, "activations": kept},
    )


def critic_update_memory_points(session: Session, plan: MicroBatchPlan) -> tuple[MemoryBreakdown, ...]:
    """The same of the critic, whose head is one number wide."""
    assert session.critic is not None
    rows, shape = rows_per_device(session, plan), largest_micro_batch(plan).shape
    kept = critic_residual_bytes(session, rows, shape, remat=session.settings.model.remat)
    _, layer = gathered_weight_bytes(session.critic.spec.definition, session.mesh)
    of_block = int(BLOCK_BACKWARD_FACTOR * _critic_block_residual_bytes(session, rows, shape))
    return (
        {"whole_weights": _num_gathered_copies(session.mesh, trained=True) * layer, "activations": kept + of_block},
    )


def peak_memory(points: Sequence[MemoryBreakdown]) -> MemoryBreakdown:
    """The one that holds most."""
    return max(points, key=lambda held: sum(held.values()))


def gathered_weight_bytes(definition: DecoderDefinition, mesh: Mesh) -> tuple[int, int]:
    """Bytes of the LM head's table and of one block while they are used: float32, gathered along fsdp.

    Of a quantized block a kernel is float32 at a time, or a few: its bytes are the most that it can be.
    """
    dims = jax.tree.map(lambda _, dims: decode_dims(dims, "gathered"), definition.shapes, definition.dims)
    whole = abstract_arrays(definition.shapes, sharding_tree(mesh, definition.shapes, dims))
    table = whole.get("output", whole["embedding"])
    return bytes_per_device(table), bytes_per_device(whole["blocks"]) // definition.architecture.num_layers


def _is_quantized(session: Session) -> bool:
    """Whether kernels become float32 only where they are used."""
    return session.model_spec.policy_definition.quantization is not None


def _num_gathered_copies(mesh: Mesh, *, trained: bool) -> int:
    """Of weights in a backward pass: they themselves where fsdp splits them, and their gradient where they learn.

    That twice, where devices add theirs up. What adapters add to it is left out.
    """
    return (mesh.shape["fsdp"] > 1) + trained * (1 + (num_row_shards(mesh) > 1))


def _hidden_bytes(session: Session, rows: int, shape: RowShape) -> int:
    itemsize = jnp.dtype(session.settings.model.dtype).itemsize
    return rows * shape.num_tokens * session.model_spec.architecture.model_dim * itemsize


def largest_micro_batch(plan: MicroBatchPlan) -> MicroBatch:
    """The micro-batch with the most token positions."""
    return max(plan.micro_batches, key=lambda one: len(one.rows) * one.shape.num_tokens)


def rows_per_device(session: Session, plan: MicroBatchPlan) -> int:
    """Rows of the fullest micro-batch on each device."""
    return len(largest_micro_batch(plan).rows) // num_local_row_shards(session.mesh)


def _logits_chunk_bytes(session: Session, rows: int, shape: RowShape) -> int:
    of_a_row = max(1, session.settings.model.logits_chunk // rows)
    num_tokens = min(of_a_row, shape.num_completion_tokens)
    return _logits_bytes(session, session.mesh, rows * num_row_shards(session.mesh), num_tokens=num_tokens)


def _logits_bytes(session: Session, mesh: Mesh, num_rows: int, *, num_tokens: int) -> int:
    shape = (num_rows, num_tokens, session.model_spec.architecture.vocab_size)
    sharding = NamedSharding(mesh, partition_spec(("rows", "tokens", "vocab"), shape, mesh))
    return bytes_per_device(jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding))


def _block_residual_bytes(session: Session, rows: int, shape: RowShape) -> int:
    return policy_residual_bytes(session, rows, shape, remat="none") // session.model_spec.architecture.num_layers


def _critic_block_residual_bytes(session: Session, rows: int, shape: RowShape) -> int:
    num_layers = session.architecture_of("critic").num_layers
    return critic_residual_bytes(session, rows, shape, remat="none") // num_layers


def policy_residual_bytes(session: Session, rows: int, shape: RowShape, *, remat: str) -> int:
    """What differentiation keeps from the policy's forward for the backward pass of `rows` rows; see `_saved`."""
    model, adapted = session.settings.model, session.model_spec.policy_definition
    of_model = adapted.architecture, adapted.lora, adapted.quantization, model.dtype
    return _trace_policy_residuals(*of_model, remat, model.logits_chunk, rows, shape)


def critic_residual_bytes(session: Session, rows: int, shape: RowShape, *, remat: str) -> int:
    """The same for the critic."""
    return _trace_value_residuals(session.architecture_of("critic"), session.settings.model.dtype, remat, rows, shape)


def reward_model_residual_bytes(session: Session, model: NetworkSpec, rows: int, shape: RowShape) -> int:
    """The same for one block of the reward model, which is never trained."""
    whole = _trace_value_residuals(model.architecture, session.settings.model.dtype, "none", rows, shape)
    return whole // model.architecture.num_layers


@functools.cache
def _trace_policy_residuals(
    architecture: Architecture,
    lora: LoRAConfig | None,
    quantization: Quantization | None,
    dtype: str,
    remat: str,
    logits_chunk: int,
    rows: int,
    shape: RowShape,
) -> int:
    definition = DecoderDefinition.create(architecture, lora=lora, quantization=quantization)

    def forward(params: Params, batch: TokenBatch) -> tuple[Array, Array]:
        return row_logprobs(
            definition.bind(params),
            batch,
            temperature=1.0,
            dtype=jnp.dtype(dtype),
            remat=remat,
            logits_chunk=logits_chunk,
        )

    return _trace_residual_bytes(forward, definition, rows, shape)


@functools.cache
def _trace_value_residuals(architecture: Architecture, dtype: str, remat: str, rows: int, shape: RowShape) -> int:
    definition = DecoderDefinition.create(architecture, ValueDecoder)

    def forward(params: Params, batch: TokenBatch) -> Array:
        return row_values(definition.bind(params), batch, dtype=jnp.dtype(dtype), remat=remat)

    return _trace_residual_bytes(forward, definition, rows, shape)


def _trace_residual_bytes(
    forward: Callable[[Params, TokenBatch], Any], definition: DecoderDefinition, rows: int, shape: RowShape
) -> int:
    """Bytes of residuals, the weights left out.

    Traced, not computed: what twice as many rows would keep more. The compiler may keep some of it differently,
    and needs room to work in; split over tp it is less.
    """

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
