"""Synchronous generation: prefills each prompt once, shares its cache, and decodes until every row is done."""

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

from app.batching.micro_batch_shapes import bucket_length
from app.distributed.collectives import max_over_hosts
from app.distributed.stop_check import StopCheck, StoppedError, never_stop
from app.mesh.compiler_options import compiler_options
from app.mesh.device_mesh import num_hosts
from app.mesh.placement import (
    local_row_indices,
    num_local_row_shards,
    row_sharding,
    to_global,
    to_local,
)
from app.mesh.submesh import to_host_submesh
from app.model.decode_weights import DecodeConversion, DecodeWeights, abstract_decode_weights
from app.model.decoder import DecoderDefinition, Params
from app.model.experts import pack_routes
from app.model.kv_cache import KVCache, abstract_cache
from app.model.prefill_and_decode import prefill
from app.records.sample import Prompt, Sample
from app.rollout.batch_programs import BatchDecodeState, RowConstants, init_decode_state, make_decode_loop
from app.rollout.counters import RolloutCounters
from app.rollout.request import GenerationRequest
from app.rollout.sampling.token_sampling import (
    SamplingRules,
    finish_reason,
    hash_uids,
    sample_keys,
    sample_tokens,
    sample_tokens_truncated,
)
from app.rollout.sequence import make_sequences
from app.rollout.stop_strings import DecodeText

SEGMENT_STEPS = 256
"""Tokens per row between two checks for a requested stop."""


class BatchShape(NamedTuple):
    """Static sizes of one generated batch, including padding."""

    num_prompts: int
    """Number of prompts on this host."""
    num_rows: int
    """Number of rows on this host."""
    prompt_length: int
    cache_length: int
    num_new: int
    block_size: int | None = None
    """Tokens of a block of the cache, if rows are split into blocks."""


class Footprint(NamedTuple):
    """Arrays that occupy the devices during decoding, as shapes with shardings."""

    weights: DecodeWeights | tuple[DecodeWeights, ...]
    prompts: KVCache
    """Caches of the prefilled prompts, freed once every row has its copy."""
    slots: KVCache


class PlacedRows(NamedTuple):
    """One batch of prompts, and the rows of their samples, placed on the mesh."""

    shape: BatchShape
    prompt_ids: Int32[Array, "P S"]
    prefill_lengths: Int32[Array, "P"]
    prompt_index: Int32[Array, "B"]
    prompt_lengths: Int32[Array, "B"]
    uid_hashes: Array
    sample_index: Int32[Array, "B"]
    max_new_tokens: Int32[Array, "B"]


class BatchEngine:
    """Compiled generation for one decoder on one mesh. It holds no weights.

    Args:
        mesh: devices used for generation. If they belong to several hosts, these hosts generate one batch together.
        training_mesh: mesh of the policy if it differs from `mesh`.
        mesh_of_all_hosts: mesh over the devices of `training_mesh`, in their order, of which `mesh` is this host's
            part; `training_mesh` if None.
        eos_ids: every token id that ends a sequence.
        decode_text: converts token ids to text.
        prefill_length_min: smallest prompt bucket, in tokens.
        max_length_total: maximum length of prompt and completion together, which bounds the cache length.
        merge_adapters: converts the weights of a policy with adapters to those of `definition`; None if the policy's
            own weights are used.
        records_routes: whether the experts that tokens pass through are recorded.
    """

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        *,
        training_mesh: Mesh | None = None,
        mesh_of_all_hosts: Mesh | None = None,
        eos_ids: Sequence[int],
        decode_text: DecodeText,
        dtype: jnp.dtype,
        prefill_length_min: int,
        max_length_total: int | None = None,
        merge_adapters: Callable[[Params], Params] | None = None,
        records_routes: bool = False,
    ):
        self.mesh = mesh
        self._training_mesh = training_mesh or mesh
        self.mesh_of_all_hosts = mesh_of_all_hosts or self._training_mesh
        self.decode_text = decode_text
        self.prefill_length_min = prefill_length_min
        self.max_length_total = max_length_total
        self.counters = RolloutCounters()
        self.stop_requested: StopCheck = never_stop
        self.definition = definition
        self._dtype = dtype
        self._eos_ids = np.asarray(eos_ids, np.int32)
        self._to_decode_weights = DecodeConversion(definition, self.mesh_of_all_hosts, dtype, merge=merge_adapters)
        options = compiler_options(mesh)
        route_shape = definition.architecture.route_shape if records_routes else None
        self._num_route_words = 0 if route_shape is None else route_shape.num_words

        def prefill_prompts(weights: DecodeWeights, ids: Array, lengths: Array) -> tuple[Array, KVCache, Array | None]:
            hidden, cache, routes = prefill(definition, weights, ids, lengths)
            return hidden, cache, pack_routes(routes) if records_routes and routes is not None else None

        self._keys = jax.jit(sample_keys)
        # The shardings are explicit, because XLA may replicate a small array on every device. A host would then read
        # the first host's rows as its own, and the second segment would be compiled for a different layout.
        # The cache needs none: it is never read back, and both programs constrain it.
        rows = row_sharding(mesh)
        self._prefill = jax.jit(prefill_prompts, out_shardings=(None, None, rows), compiler_options=options)
        slots = BatchDecodeState._make(None if field == "cache" else rows for field in BatchDecodeState._fields)
        self._open = jax.jit(
            functools.partial(init_decode_state, num_route_words=self._num_route_words),
            static_argnames=("cache_length", "num_new"),
            out_shardings=(None, slots),
        )
        shardings = slots, NamedSharding(mesh, PartitionSpec())
        self._decode = {
            sampler: jax.jit(
                make_decode_loop(definition, sampler),
                donate_argnames="slots",
                out_shardings=shardings,
                compiler_options=options,
            )
            for sampler in (sample_tokens, sample_tokens_truncated)
        }

    def to_decode_weights(self, params: Params) -> DecodeWeights:
        """Converts the policy to decode weights, once per policy version. The caller drops them before the update.

        One program on the training mesh gives every host the whole weights. All hosts must call it from their training
        threads; while one waits for the others, no host may run another program.
        """
        with jax.set_mesh(self._training_mesh):
            weights = self._to_decode_weights(params)
        return weights if self.mesh == self.mesh_of_all_hosts else to_host_submesh(weights, self.mesh)

    def generate(self, weights: DecodeWeights, prompts: Sequence[Prompt], request: GenerationRequest) -> list[Sample]:
        """Returns `group_size` samples for each of this host's prompts, in order, as ragged records.

        Every host of the mesh must call it with the same number of prompts and the same largest `max_new_tokens`.

        Raises:
            StoppedError: a stop was requested on any host of the mesh; all of them raise it.
        """
        self._raise_if_stopped()
        started, rules, version = time.perf_counter(), request.rules, request.policy_version
        rows = self._place_rows(prompts, request.group_size, request.max_new_tokens)
        with jax.set_mesh(self.mesh):
            hidden, cache, prompt_routes = self._prefill(weights, rows.prompt_ids, rows.prefill_lengths)
            keys = self._keys(request.seed, version, rows.uid_hashes, rows.sample_index)
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
        of_prompts = None if prompt_routes is None else to_local(prompt_routes)
        if slots.routes is not None:
            drawn = np.concatenate([drawn, np.moveaxis(to_local(slots.routes), 2, 0)])
        lengths, stopped, non_finite = map(to_local, (slots.lengths, slots.stopped, slots.non_finite))
        num_tokens, steps = sum(len(prompt.token_ids) for prompt in prompts), self._max_over_hosts(int(lengths.max()))
        self.counters.prefilled_tokens += num_tokens
        self.counters.prompt_tokens += num_tokens * request.group_size
        self.counters.count_segment(steps=steps, num_rows=len(lengths), num_generated=int(lengths.sum()))
        samples, elapsed_s = [], time.perf_counter() - started
        for number, row in enumerate(make_sequences(prompts, request, noise_step=version)):
            row.num_tokens, row.num_segments, row.elapsed_s = int(lengths[number]), 1, elapsed_s
            row.finish_reason = finish_reason(stopped[number], non_finite[number])
            row.worker = str(jax.process_index())
            tokens = drawn[:, number, : row.num_tokens].copy()
            if of_prompts is not None:
                row.prompt_routes = of_prompts[number // request.group_size, : len(row.prompt.token_ids)]
                # The prefill has fed the last token of a prompt.
                tokens[3:, :1] = row.prompt_routes[-1:].T[:, : row.num_tokens]
            row.segment_tokens.append(tokens)
            row.segment_versions.append((version, row.num_tokens))
            group_id = request.first_group_id + number // request.group_size
            samples.append(row.to_sample(group_id, request, decode_text=self.decode_text))
        return samples

    def _raise_if_stopped(self) -> None:
        """Raises StoppedError on all hosts of the mesh if a stop was requested on any of them."""
        if self._max_over_hosts(int(self.stop_requested())):
            raise StoppedError

    def _max_over_hosts(self, value: int) -> int:
        """Returns the maximum over the hosts of the mesh; a single host needs no collective."""
        return value if num_hosts(self.mesh) == 1 else int(max_over_hosts(np.asarray(value)))

    def _bucket_length(self, length: int) -> int:
        """Rounds a length up to a bucket. Prompts and caches share the buckets, so a prompt's cache always fits."""
        size = bucket_length(length, min_bucket=self.prefill_length_min)
        return size if self.max_length_total is None else max(min(size, self.max_length_total), length)

    def batch_shape(self, *, num_prompts: int, group_size: int, longest_prompt: int, max_new_tokens: int) -> BatchShape:
        """Returns the shape of a batch: lengths rounded up to buckets, rows to a multiple of the devices."""
        shards = num_local_row_shards(self.mesh)
        prompts = -(-num_prompts // shards) * shards
        # Of the devices along tp, too, which share out rows where they cannot split heads.
        devices = self.mesh.size // num_hosts(self.mesh)
        rows = -(-num_prompts * group_size // devices) * devices
        cache_length = self._bucket_length(longest_prompt + max_new_tokens)
        return BatchShape(prompts, rows, self._bucket_length(longest_prompt), cache_length, max_new_tokens)

    @property
    def abstract_weights(self) -> DecodeWeights:
        """Shapes of the decode weights, with shardings."""
        return abstract_decode_weights(self.definition, self.mesh, self._dtype)

    def footprint(self, shape: BatchShape) -> Footprint:
        """Returns the arrays of `generate` on the devices of all hosts. Traces its programs without compiling them."""
        hosts, weights = num_hosts(self.mesh), self.abstract_weights
        per_prompt: Any = jax.ShapeDtypeStruct((shape.num_prompts * hosts,), jnp.int32)
        per_row: Any = jax.ShapeDtypeStruct((shape.num_rows * hosts,), jnp.int32)
        ids = jax.ShapeDtypeStruct((*per_prompt.shape, shape.prompt_length), jnp.int32)
        hidden, prompts, _ = jax.eval_shape(self._prefill, weights, ids, per_prompt)
        opened = functools.partial(init_decode_state, cache_length=shape.cache_length, num_new=shape.num_new)
        # The keys are not read here, so any array can replace them.
        _, slots = jax.eval_shape(opened, hidden, prompts, RowConstants(per_row, per_row, per_row, per_row))
        return Footprint(weights, abstract_cache(prompts, self.mesh), abstract_cache(slots.cache, self.mesh))

    def lower_programs(self, shape: BatchShape, *, truncates: bool) -> dict[str, Lowered]:
        """Returns the programs of `generate`, lowered for shapes with shardings."""
        hosts, dim = num_hosts(self.mesh), self.definition.architecture.model_dim
        footprint, rows = self.footprint(shape), row_sharding(self.mesh)
        weights, num_prompts, num_rows = footprint.weights, shape.num_prompts * hosts, shape.num_rows * hosts

        def abstract(*sizes: int, dtype: Any = jnp.int32) -> Any:
            return jax.ShapeDtypeStruct(sizes, dtype, sharding=rows)

        counts, flags = abstract(num_rows), abstract(num_rows, dtype=jnp.bool)
        keys: Any = jax.eval_shape(sample_keys, 0, 0, abstract(num_rows, 2, dtype=jnp.uint32), counts)
        constants = RowConstants(counts, counts, abstract(*keys.shape, dtype=keys.dtype), counts)
        ids, floats = abstract(num_rows, shape.num_new), abstract(num_rows, shape.num_new, dtype=jnp.float32)
        words = abstract(num_rows, shape.num_new, self._num_route_words) if self._num_route_words else None
        slots = BatchDecodeState(footprint.slots, ids, floats, floats, counts, flags, flags, flags, words)
        with jax.set_mesh(self.mesh):
            prefill = self._prefill.lower(weights, abstract(num_prompts, shape.prompt_length), abstract(num_prompts))
            decode = self._decode[sample_tokens_truncated if truncates else sample_tokens].lower(
                weights,
                abstract(num_rows, dim, dtype=self._dtype),
                constants,
                slots=slots,
                steps=np.asarray([0, SEGMENT_STEPS], np.int32),
                rules=SamplingRules(1.0, 0, 1.0, 0.0),
                eos_ids=self._eos_ids,
            )
        return {"prefill": prefill, "decode": decode}

    def _place_rows(
        self, prompts: Sequence[Prompt], group_size: int, max_new_tokens: int | Sequence[int]
    ) -> PlacedRows:
        """Pads prompts on the right to a bucket, pads the batch to a multiple of the devices, and places it on them."""
        shape = self.batch_shape(
            num_prompts=len(prompts),
            group_size=group_size,
            longest_prompt=self._max_over_hosts(max(len(p.token_ids) for p in prompts)),
            max_new_tokens=int(np.max(max_new_tokens)),
        )
        num_prompts, num_rows = shape.num_prompts, shape.num_rows
        ids = np.zeros((num_prompts, shape.prompt_length), np.int32)
        lengths = np.zeros(num_prompts, np.int32)
        for i, prompt in enumerate(prompts):
            ids[i, : len(prompt.token_ids)] = prompt.token_ids
            lengths[i] = len(prompt.token_ids)
        # Padding rows repeat the last prompt and draw nothing.
        prompt_of_row = np.minimum(np.arange(num_rows) // group_size, len(prompts) - 1)
        limits = np.zeros(num_rows, np.int32)
        limits[: len(prompts) * group_size] = max_new_tokens
        global_prompts = num_prompts * num_hosts(self.mesh)
        place = functools.partial(to_global, self.mesh)
        return PlacedRows(
            shape=shape,
            prompt_ids=place(ids),
            prefill_lengths=place(lengths),
            prompt_index=place(local_row_indices(self.mesh, global_prompts)[prompt_of_row].astype(np.int32)),
            prompt_lengths=place(lengths[prompt_of_row]),
            uid_hashes=place(hash_uids([p.uid for p in prompts])[prompt_of_row]),
            sample_index=place((np.arange(num_rows) % group_size).astype(np.int32)),
            max_new_tokens=place(limits),
        )
