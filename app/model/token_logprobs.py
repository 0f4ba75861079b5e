"""Logprobs and entropies of target tokens from hidden states, computed without a [tokens, vocab] array.

On a mesh, each device has a part of the vocabulary, for the rows of all devices that share weights: no device holds the
whole table, its gradient, or the logits of the whole vocabulary. Rows are gathered instead, and the softmax is reduced
over the parts. Source: Shoeybi et al. 2019, Megatron-LM, section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from app.mesh.axis_rules import LOGICAL_AXIS_RULES, axis_size, constrain, shard_map_by_dims
from app.model.attention.dense import MASK_VALUE, apply_soft_cap
from app.model.decoder import LMHead

LM_HEAD_SCOPE = "lm_head"
"""The name scope of the LM head in compiled programs."""

VOCAB_AXES = LOGICAL_AXIS_RULES["head_vocab"]
ROW_DIMS = ("rows", "tokens")
HIDDEN_DIMS = ("rows", "tokens", "activation")
TABLE_DIMS = ("head_vocab", "activation")
INPUT_DIMS = (HIDDEN_DIMS, TABLE_DIMS, ROW_DIMS, ("tokens",), ())
"""The logical dims of the arguments of `ShardedHead.apply`."""


@jax.named_scope(LM_HEAD_SCOPE)
def scaled_logits(
    hidden: Float[Array, "*rows D"], head: LMHead, temperature: Float32[Array, ""] | float
) -> Float32[Array, "*rows V"]:
    """Returns the head's logits / temperature in float32."""
    return head.logits(hidden) / temperature


@jax.named_scope(LM_HEAD_SCOPE)
def token_logprobs(
    hidden: Float[Array, "R C D"],
    head: LMHead,
    targets: Int32[Array, "R C"],
    target_mask: Bool[Array, "R C"],
    *,
    temperature: Float32[Array, ""] | float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"]]:
    """Returns the natural logprob of each target, and the entropy in nats of its distribution.

    The logprob is log_softmax(logits / temperature)[target] over the whole vocabulary. `chunk` tokens of every row pass
    through the head at once, forward and backward; the result does not depend on `chunk`. Chunks without targets are
    skipped; their results are 0. The temperature gets no gradient.

    Args:
        target_mask: True where there is a target; results elsewhere are finite and undefined.
        entropy_gradient: whether the entropy has a gradient.
    """
    num_tokens = targets.shape[1]
    chunk = min(chunk, num_tokens)
    padding = ((0, 0), (0, -num_tokens % chunk))
    hidden = jnp.pad(hidden, (*padding, (0, 0)))
    targets, target_mask = jnp.pad(targets, padding), jnp.pad(target_mask, padding)
    has_targets = target_mask.reshape(target_mask.shape[0], -1, chunk).any(axis=(0, 2))
    sharded = ShardedHead(chunk, head.soft_cap, entropy_gradient, num_rows=len(targets), vocab_size=len(head.table))
    # JAX declares no return type for custom_vjp functions.
    by_token: Any = _apply_head(
        sharded, hidden, head.table, targets, has_targets, jnp.asarray(temperature, jnp.float32)
    )
    logprobs, entropies = by_token
    return logprobs[:, :num_tokens], entropies[:, :num_tokens]


@dataclass(frozen=True)
class ShardedHead:
    """Computes logprobs, entropies and gradients chunk by chunk; a static argument of compiled functions."""

    chunk_size: int
    """Number of tokens of every row that pass through the head at once."""
    soft_cap: float | None
    entropy_gradient: bool
    """Whether the entropy has a gradient."""
    num_rows: int
    """Number of rows on all devices."""
    vocab_size: int

    def apply(
        self,
        hidden: Float[Array, "R C D"],
        table: Float[Array, "V D"],
        targets: Int32[Array, "R C"],
        has_targets: Bool[Array, "chunks"],
        temperature: Float32[Array, ""],
    ) -> tuple[Float32[Array, "R C"], Float32[Array, "R C"], Float32[Array, "R C"]]:
        """Returns logprobs, entropies, and the log-sum-exp of each token's logits; 0 in chunks without targets."""
        run = shard_map_by_dims(self._apply_part, in_dims=INPUT_DIMS, out_dims=(ROW_DIMS,) * 3)
        return run(hidden, self._padded(table, hidden), targets, has_targets, temperature)

    def gradients(
        self, hidden: Float[Array, "R C D"], table: Float[Array, "V D"], *others: Array
    ) -> tuple[Float[Array, "R C D"], Float[Array, "V D"]]:
        """Returns the gradients of the hidden states and of the table.

        Args:
            others: the other arguments of `apply`, the entropies and log-sum-exps that it returned, and the gradients
                of logprobs and entropies.
        """
        in_dims = (*INPUT_DIMS, *(ROW_DIMS,) * 4)
        run = shard_map_by_dims(self._part_gradients, in_dims=in_dims, out_dims=(HIDDEN_DIMS, TABLE_DIMS))
        hidden_grad, table_grad = run(hidden, self._padded(table, hidden), *others)
        return hidden_grad, constrain(table_grad[: self.vocab_size], "vocab", "embed").astype(table.dtype)

    def _padded(self, table: Float[Array, "V D"], hidden: Array) -> Float[Array, "padded D"]:
        """Returns the table in the hidden states' dtype, with its vocabulary padded to split evenly."""
        table = jnp.pad(table.astype(hidden.dtype), ((0, -self.vocab_size % _num_parts()), (0, 0)))
        return constrain(table, *TABLE_DIMS)

    def _apply_part(
        self, hidden: Array, table: Array, targets: Array, has_targets: Array, temperature: Array
    ) -> tuple[Array, ...]:
        """Returns one device's part of the results of `apply`."""

        def write(i: Array, results: tuple[Array, ...]) -> tuple[Array, ...]:
            first = chunks[i] * self.chunk_size
            logits = self._logits(self._rows(hidden, first), table, temperature)
            highest = _over_vocab(jax.lax.pmax, logits.max(axis=-1))
            # Relative to the highest logit, so that the entropy keeps its precision for large logits. All sums come
            # from one pass over the logits.
            relative = logits - highest[..., None]
            weights = jnp.exp(relative)
            is_target = _vocab_ids(table) == self._rows(targets, first)[..., None]
            terms = weights, weights * relative, jnp.where(is_target, relative, 0.0)
            total, weighted, of_target = (_over_vocab(jax.lax.psum, x.sum(axis=-1)) for x in terms)
            log_total = jnp.log(total)
            logprobs, entropies, normalizer = of_target - log_total, log_total - weighted / total, highest + log_total
            new = (self._own_rows(x) for x in (logprobs, entropies, normalizer))
            return tuple(_update_tokens(x, part, first) for x, part in zip(results, new, strict=True))

        chunks, num_chunks = _order_chunks(has_targets)
        none = jnp.zeros(targets.shape, jnp.float32)
        return jax.lax.fori_loop(0, num_chunks, write, (none, none, none))

    def _part_gradients(
        self, hidden: Array, table: Array, targets: Array, has_targets: Array, temperature: Array, *by_token: Array
    ) -> tuple[Array, Array]:
        """Returns the gradients of one device's rows and of its part of the table."""

        def add(i: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            first = chunks[i] * self.chunk_size
            rows = self._rows(hidden, first)
            entropies, normalizer, *grads = (self._rows(x, first)[..., None] for x in by_token)
            logprob_grad, entropy_grad = (x / temperature for x in grads)
            logits = self._logits(rows, table, temperature)
            log_softmax = logits - normalizer
            probabilities = jnp.exp(log_softmax)
            is_target = _vocab_ids(table) == self._rows(targets, first)[..., None]
            logits_grad = logprob_grad * (is_target - probabilities)
            if self.entropy_gradient:
                logits_grad -= entropy_grad * probabilities * (log_softmax + entropies)
            if self.soft_cap is not None:
                # Clips only where the vocabulary is padded, since no capped logit exceeds its cap.
                logits_grad *= 1 - jnp.square(jnp.clip(logits * temperature / self.soft_cap, -1, 1))
            logits_grad = logits_grad.astype(hidden.dtype)
            rows_grad = self._own_rows_of_sum(_einsum("rcv,vd->rcd", logits_grad, table))
            table_grad = sums[1] + _einsum("rcv,rcd->vd", logits_grad, rows)
            return _update_tokens(sums[0], rows_grad.astype(hidden.dtype), first), table_grad

        chunks, num_chunks = _order_chunks(has_targets)
        none = jnp.zeros_like(hidden), jnp.zeros(table.shape, jnp.float32)
        hidden_grad, table_grad = jax.lax.fori_loop(0, num_chunks, add, none)
        return hidden_grad, jax.lax.psum(table_grad, "dp") if self._splits_rows() else table_grad

    def _logits(self, rows: Float[Array, "R c D"], table: Float[Array, "V D"], temperature: Array) -> Array:
        logits = apply_soft_cap(_einsum("rcd,vd->rcv", rows, table), self.soft_cap) / temperature
        if self.vocab_size % _num_parts() == 0:
            return logits
        return jnp.where(_vocab_ids(table) < self.vocab_size, logits, MASK_VALUE)

    def _splits_rows(self) -> bool:
        """Returns whether each device along dp and fsdp has its own rows."""
        mesh = jax.sharding.get_abstract_mesh()
        return mesh.size > 1 and self.num_rows % axis_size(mesh, LOGICAL_AXIS_RULES["rows"]) == 0

    def _rows(self, x: Array, first: Array) -> Array:
        """Returns a chunk of tokens, from all rows of the devices along fsdp."""
        chunk = jax.lax.dynamic_slice_in_dim(x, first, self.chunk_size, axis=1)
        return jax.lax.all_gather(chunk, "fsdp", tiled=True) if self._splits_rows() else chunk

    def _own_rows(self, x: Array) -> Array:
        """Returns this device's rows of a result of `_rows`."""
        if not self._splits_rows():
            return x
        num_rows = len(x) // jax.lax.axis_size("fsdp")
        return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index("fsdp") * num_rows, num_rows)

    def _own_rows_of_sum(self, x: Array) -> Array:
        """Returns this device's rows of the sum over all parts of the vocabulary."""
        if not self._splits_rows():
            return _over_vocab(jax.lax.psum, x)
        return jax.lax.psum(jax.lax.psum_scatter(x, "fsdp", tiled=True), "tp")


def _num_parts() -> int:
    mesh = jax.sharding.get_abstract_mesh()
    return axis_size(mesh, VOCAB_AXES) if mesh.size > 1 else 1


def _over_vocab(reduce: Callable[..., Array], x: Array) -> Array:
    return reduce(x, VOCAB_AXES) if _num_parts() > 1 else x


def _vocab_ids(table: Float[Array, "V D"]) -> Int32[Array, "V"]:
    """Returns the token ids of this device's part of the table."""
    first = jax.lax.axis_index(VOCAB_AXES) * len(table) if _num_parts() > 1 else 0
    return first + jnp.arange(len(table))


def _einsum(dims: str, *arrays: Array) -> Float32[Array, "..."]:
    return jnp.einsum(dims, *arrays, preferred_element_type=jnp.float32)


def _update_tokens(x: Array, part: Array, first: Array) -> Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, first, axis=1)


def _order_chunks(has_targets: Bool[Array, "n"]) -> tuple[Int32[Array, "n"], Int32[Array, ""]]:
    """Returns the chunk indices, chunks with targets first, and the number of chunks with targets."""
    return jnp.argsort(~has_targets, stable=True), jnp.sum(has_targets, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apply_head(head: ShardedHead, *inputs: Array) -> tuple[Array, Array]:
    """Returns logprobs and entropies. Has a custom gradient, since JAX cannot differentiate its `while` loop."""
    return head.apply(*inputs)[:2]


def _apply_head_forward(head: ShardedHead, *inputs: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    logprobs, entropies, normalizers = head.apply(*inputs)
    return (logprobs, entropies), (*inputs, entropies, normalizers)


_apply_head.defvjp(_apply_head_forward, lambda head, kept, grads: (*head.gradients(*kept, *grads), None, None, None))


def hidden_before_targets(hidden: Float[Array, "R T D"], logits_indices: Int32[Array, "R C"]) -> Float[Array, "R C D"]:
    """Returns the hidden state before each target; undefined where there is no target."""
    return jnp.take_along_axis(hidden, jnp.maximum(logits_indices, 0)[:, :, None], axis=1)
