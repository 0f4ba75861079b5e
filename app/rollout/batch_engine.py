"""Synchronous generation: prefill each prompt once, share its cache, decode until every row is done."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered
from jaxtyping import Array, Int32

from app.batching.length_buckets import bucket_length
from app.distributed.cancellation import StopCheck, StoppedError, never_stop
from app.distributed.collectives import max_over_hosts
from app.mesh.placement import (
    local_row_indices,
    num_local_row_shards,
    row_sharding,
    to_global,
    to_local,
    tree_shardings,
)
from app.mesh.submesh import to_host_submesh
from app.mesh.topology import num_hosts
from app.model.decoder import DecoderDefinition, Params
from app.model.kv_cache import (
    DecodeWeights,
    KVCache,
    abstract_cache,
    abstract_decode_weights,
    make_decode_weights,
    make_merged_decode_weights,
    prefill,
)
from app.records.sample import Prompt, Sample
from app.rollout.batch_programs import BatchDecodeState, RowConstants, init_decode_state, make_decode_loop
from app.rollout.counters import RolloutCounters
from app.rollout.sampling import (
    SamplingRules,
    finish_reason,
    hash_uids,
    sample_keys,
    sample_tokens,
    sample_tokens_truncated,
)
from app.rollout.sequence import RolloutSequence
from settings.schema.rollout import DecodeLayout

SEGMENT_STEPS = 256
"""Tokens of a row until the host looks up from a batch, to see whether it was asked to stop."""


class BatchShape(NamedTuple):
    """Static sizes of one generation, padding included."""

    num_prompts: int
    """On this host."""
    num_rows: int
    """On this host."""
    prompt_length: int
    cache_length: int
    num_new: int


class Footprint(NamedTuple):
    """What fills the devices while tokens are drawn, as shapes on their shardings."""

    weights: DecodeWeights | tuple[DecodeWeights, ...]
    prompts: KVCache
    """Of the prefilled prompts; gone once every slot has its copy."""
    slots: KVCache


class BatchEngine:
    """Compiled generation for one decoder on one mesh. Holds no weights.

    Args:
        mesh: on which it generates; of a mesh of several hosts, the hosts generate one batch together.
        trained_on: the mesh on which the policy lies, if that is another: `mesh` is this host's island of it.
        eos_ids: every token id that ends a sequence.
        decode_text: token ids -> text, for the record.
        prefill_length_min: smallest prompt bucket, in tokens.
        max_length_total: no prompt and completion are longer together: the top of the cache's ladder.
        decode_layout: where the weights lie meanwhile; see `DecodeWeights`.
        merge: the weights of a policy with adapters -> those of `definition`; None where these are the policy's own.
    """

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        *,
        training_mesh: Mesh | None = None,
        eos_ids: Sequence[int],
        decode_text: Callable[[Sequence[int]], str],
        dtype: jnp.dtype,
        prefill_length_min: int,
        max_length_total: int | None = None,
        decode_layout: DecodeLayout = "gathered",
        merge_adapters: Callable[[Params], Params] | None = None,
    ):
        self.mesh = mesh
        self._training_mesh = training_mesh or mesh
        self.decode_text = decode_text
        self.prefill_length_min = prefill_length_min
        self.max_length_total = max_length_total
        self.counters = RolloutCounters()
        self.stop_requested: StopCheck = never_stop
        self.definition = definition
        self._dtype = dtype
        self._decode_layout: DecodeLayout = decode_layout
        self._eos_ids = np.asarray(eos_ids, np.int32)
        # Said outright: an island takes over what it finds in this layout, programs of slots are compiled for it.
        layout = tree_shardings(abstract_decode_weights(definition, self._training_mesh, dtype, decode_layout))
        lay_out = (
            make_decode_weights
            if merge_adapters is None
            else functools.partial(make_merged_decode_weights, merge=merge_adapters)
        )
        self._weights = jax.jit(lambda params: lay_out(definition, params, dtype, decode_layout), out_shardings=layout)
        self._prefill = jax.jit(lambda weights, ids, lengths: prefill(definition, weights, ids, lengths))
        self._keys = jax.jit(sample_keys)
        # Said outright, because XLA may leave a small array whole on every device: a host would then read the first
        # host's rows as its own, and the second segment find its rows elsewhere than the first and compile anew.
        # The cache is never read back, and both programs constrain it.
        rows = row_sharding(mesh)
        slots = BatchDecodeState._make(None if field == "cache" else rows for field in BatchDecodeState._fields)
        self._open = jax.jit(
            init_decode_state, static_argnames=("cache_length", "num_new"), out_shardings=(None, slots)
        )
        laid_out = slots, NamedSharding(mesh, PartitionSpec())
        self._decode = {
            sampler: jax.jit(make_decode_loop(definition, sampler), donate_argnames="slots", out_shardings=laid_out)
            for sampler in (sample_tokens, sample_tokens_truncated)
        }

    def to_decode_weights(self, params: Params) -> DecodeWeights:
        """The policy in decoding form; make it once per policy version and drop it before the update.

        One program on the mesh of training lays them out as they decode, whole on every host. All hosts call it, each
        from the thread that trains: where it waits for other hosts, no other program of theirs may come in between.
        """
        with jax.set_mesh(self._training_mesh):
            weights = self._weights(params)
        return weights if self.mesh == self._training_mesh else to_host_submesh(weights, self.mesh)

    def generate(
        self,
        weights: DecodeWeights,
        prompts: Sequence[Prompt],
        *,
        group_size: int,
        max_new_tokens: int | Sequence[int],
        rules: SamplingRules,
        seed: int,
        policy_version: int,
        first_group_id: int = 0,
    ) -> list[Sample]:
        """`group_size` samples of each of this host's prompts, in order, as ragged records.

        Every host of its mesh calls it with the same number of prompts. `policy_version` keys the noise, so
        that the same prompt gives new samples at every training step.

        Args:
            max_new_tokens: of every sample, or of each in order; the largest is the same on every host of the mesh.

        Raises:
            StoppedError: a host of the mesh was asked to stop. All of them raise it.
        """
        self._raise_if_stopped()
        started = time.perf_counter()
        rows = self._place_rows(prompts, group_size, max_new_tokens)
        with jax.set_mesh(self.mesh):
            hidden, cache = self._prefill(weights, rows.prompt_ids, rows.prefill_lengths)
            keys = self._keys(seed, policy_version, rows.uid_hashes, rows.sample_index)
            constants = RowConstants(rows.prompt_index, rows.prompt_lengths, keys, rows.max_new_tokens)
            row_hidden, slots = self._open(
                hidden, cache, constants, cache_length=rows.shape.cache_length, num_new=rows.shape.num_new
            )
            del hidden, cache
            decode = self._decode[sample_tokens_truncated if rules.truncates else sample_tokens]
            first = 0
            while True:
                steps = np.asarray([first, first + SEGMENT_STEPS], np.int32)
                slots, all_done = decode(
                    weights, row_hidden, constants, slots=slots, steps=steps, rules=rules, eos_ids=self._eos_ids
                )
                if all_done:
                    break
                self._raise_if_stopped()
                first += SEGMENT_STEPS
        drawn = np.stack([to_local(x).view(np.int32) for x in (slots.token_ids, slots.logprobs, slots.kept_mass_logs)])
        lengths, stopped, non_finite = map(to_local, (slots.lengths, slots.stopped, slots.non_finite))
        self._count_tokens(prompts, lengths, group_size=group_size)
        samples, elapsed_s = [], time.perf_counter() - started
        for number in range(len(prompts) * group_size):
            row = RolloutSequence(
                prompts[number // group_size],
                number % group_size,
                max_new_tokens=len(drawn[0, number]),
                noise_step=policy_version,
                num_tokens=int(lengths[number]),
                num_segments=1,
                elapsed_s=elapsed_s,
                finish_reason=finish_reason(stopped[number], non_finite[number]),
                worker=str(jax.process_index()),
                segment_tokens=[drawn[:, number, : lengths[number]].copy()],
                segment_versions=[(policy_version, int(lengths[number]))],
            )
            group_id = first_group_id + number // group_size
            samples.append(row.to_sample(group_id, decode_text=self.decode_text, truncates=rules.truncates))
        return samples

    def _raise_if_stopped(self) -> None:
        """At the edge of a segment."""
        if self._max_over_hosts(int(self.stop_requested())):
            raise StoppedError

    def _count_tokens(self, prompts: Sequence[Prompt], lengths: Int32[np.ndarray, "B"], *, group_size: int) -> None:
        num_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        self.counters.prefilled_tokens += num_tokens
        self.counters.prompt_tokens += num_tokens * group_size
        steps = self._max_over_hosts(int(lengths.max()))
        self.counters.count_segment(steps=steps, num_rows=len(lengths), num_generated=int(lengths.sum()))

    def _max_over_hosts(self, value: int) -> int:
        """The largest of any host on the mesh. A mesh of this host's devices waits for nobody."""
        return value if num_hosts(self.mesh) == 1 else int(max_over_hosts(np.asarray(value)))

    def _bucket_length(self, length: int) -> int:
        """Prompt buckets and cache lengths share one ladder, so a prompt's cache always fits its slots."""
        size = bucket_length(length, min_bucket=self.prefill_length_min)
        return size if self.max_length_total is None else max(min(size, self.max_length_total), length)

    def batch_shape(self, *, num_prompts: int, group_size: int, longest_prompt: int, max_new_tokens: int) -> BatchShape:
        """The shape in which so many prompts of this host are generated from: lengths on the ladder, whole devices."""
        shards = num_local_row_shards(self.mesh)
        prompts, rows = (-(-n // shards) * shards for n in (num_prompts, num_prompts * group_size))
        cache_length = self._bucket_length(longest_prompt + max_new_tokens)
        return BatchShape(prompts, rows, self._bucket_length(longest_prompt), cache_length, max_new_tokens)

    def footprint(self, shape: BatchShape) -> Footprint:
        """What `generate` holds, over all hosts. Traces its programs and compiles none of them."""
        hosts = num_hosts(self.mesh)
        weights = abstract_decode_weights(self.definition, self.mesh, self._dtype, self._decode_layout)
        of_prompts: Any = jax.ShapeDtypeStruct((shape.num_prompts * hosts,), jnp.int32)
        of_rows: Any = jax.ShapeDtypeStruct((shape.num_rows * hosts,), jnp.int32)
        ids = jax.ShapeDtypeStruct((*of_prompts.shape, shape.prompt_length), jnp.int32)
        hidden, prompts = jax.eval_shape(self._prefill, weights, ids, of_prompts)
        opened = functools.partial(init_decode_state, cache_length=shape.cache_length, num_new=shape.num_new)
        # Opening a slot does not look at its keys.
        _, slots = jax.eval_shape(
            opened, hidden, prompts, RowConstants(of_rows, of_rows, keys=of_rows, max_new_tokens=of_rows)
        )
        return Footprint(weights, abstract_cache(prompts, self.mesh), abstract_cache(slots.cache, self.mesh))

    def lower_programs(self, shape: BatchShape, *, truncates: bool) -> dict[str, Lowered]:
        """The programs of `generate`, for shapes with shardings."""
        hosts, dim = num_hosts(self.mesh), self.definition.architecture.model_dim
        held, rows = self.footprint(shape), row_sharding(self.mesh)
        num_prompts, num_rows = shape.num_prompts * hosts, shape.num_rows * hosts

        def of(*sizes: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows)

        keys: Any = jax.eval_shape(sample_keys, 0, 0, of(num_rows, 2, dtype=jnp.uint32), of(num_rows))
        constants = RowConstants(of(num_rows), of(num_rows), of(*keys.shape, dtype=keys.dtype), of(num_rows))
        drawn = of(num_rows, shape.num_new, dtype=jnp.float32)
        flag = of(num_rows, dtype=jnp.bool)
        slots = BatchDecodeState(held.slots, of(*drawn.shape), drawn, drawn, of(num_rows), flag, flag, flag)
        rules = SamplingRules(1.0, 0, 1.0, 0.0)
        with jax.set_mesh(self.mesh):
            weights = held.weights
            prefill = self._prefill.lower(weights, of(num_prompts, shape.prompt_length), of(num_prompts))
            decode = self._decode[sample_tokens_truncated if truncates else sample_tokens].lower(
                weights,
                of(num_rows, dim, dtype=self._dtype),
                constants,
                slots=slots,
                steps=np.asarray([0, SEGMENT_STEPS], np.int32),
                rules=rules,
                eos_ids=self._eos_ids,
            )
        return {"prefill": prefill, "decode": decode}

    def _place_rows(
        self, prompts: Sequence[Prompt], group_size: int, max_new_tokens: int | Sequence[int]
    ) -> PlacedRows:
        """Right-pads prompts to a bucket, and prompts and rows to whole devices."""
        longest = self._max_over_hosts(max(len(p.token_ids) for p in prompts))
        shape = self.batch_shape(
            num_prompts=len(prompts),
            group_size=group_size,
            longest_prompt=longest,
            max_new_tokens=int(np.max(max_new_tokens)),
        )
        num_prompts, num_rows = shape.num_prompts, shape.num_rows
        ids = np.zeros((num_prompts, shape.prompt_length), np.int32)
        lengths = np.zeros(num_prompts, np.int32)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt.token_ids)] = prompt.token_ids
            lengths[i] = len(prompt.token_ids)
        # Padding rows repeat the last prompt and may draw nothing.
        prompt_of_row = np.minimum(np.arange(num_rows) // group_size, len(prompts) - 1)
        budget = np.zeros(num_rows, np.int32)
        budget[: len(prompts) * group_size] = max_new_tokens
        global_prompts = num_prompts * num_hosts(self.mesh)
        place = lambda x: to_global(self.mesh, x)  # noqa: E731
        return PlacedRows(
            shape=shape,
            prompt_ids=place(ids),
            prefill_lengths=place(lengths),
            prompt_index=place(local_row_indices(self.mesh, global_prompts)[prompt_of_row].astype(np.int32)),
            prompt_lengths=place(lengths[prompt_of_row]),
            uid_hashes=place(hash_uids([p.uid for p in prompts])[prompt_of_row]),
            sample_index=place((np.arange(num_rows) % group_size).astype(np.int32)),
            max_new_tokens=place(budget),
        )


class PlacedRows(NamedTuple):
    """One batch of prompts and the rows of their samples, on the mesh."""

    shape: BatchShape
    prompt_ids: Int32[Array, "P S"]
    prefill_lengths: Int32[Array, "P"]
    prompt_index: Int32[Array, "B"]
    prompt_lengths: Int32[Array, "B"]
    uid_hashes: Array
    sample_index: Int32[Array, "B"]
    max_new_tokens: Int32[Array, "B"]
