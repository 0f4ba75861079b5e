"""Checks attention on a run's devices by comparing packed rows with one row per sample, computed by plain XLA."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Float64

from app.batching.micro_batch_plan import MicroBatch, RowShape
from app.batching.token_batch import pack_tokens
from app.mesh.placement import num_local_row_shards, row_sharding, to_global, to_local
from app.model.architecture import Architecture
from app.model.attention.cached import cache_block_size, decode_block_size, extend_cache
from app.model.attention.dense import ScoreMod, dot_product_attention
from app.model.attention.packed import architecture_blocking, packed_attention
from app.model.attention.pairs import Blocking
from app.model.kv_cache import LayerCache
from app.model.segment_layout import SegmentLayout, attention_mask, single_segment_layout
from app.preflight.check_results import CheckRecorder
from app.records.sample import Prompt, Sample
from app.runtime.generators import slot_shapes
from app.runtime.model_spec import NetworkSpec
from app.runtime.scoring import ScoringSession, set_compute_dtype
from app.training.learner import LearnerGroup, longest_rows

TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
"""Maps a compute dtype to the tolerated difference, relative to the largest magnitude in an array."""
NUM_TOKENS, PROMPT, COMPLETION, WINDOW = 700, 150, 120, 100
"""Lengths in tokens: the packed row (several kernel blocks on every platform), a prompt, a completion, the window."""
SAMPLE_PLACES = (
    np.r_[:PROMPT, PROMPT : PROMPT + COMPLETION],
    np.r_[:PROMPT, PROMPT + COMPLETION : PROMPT + 2 * COMPLETION],
    np.r_[PROMPT + 2 * COMPLETION : 2 * PROMPT + 3 * COMPLETION],
)
"""Positions of each sample's tokens in the packed row: two samples share a prompt, the third has its own."""
RESULTS = (
    *("the output", "the gradient of queries", "the gradient of keys", "the gradient of values"),
    *("the output of decoding", "the cache of keys", "the cache of values"),
)


def check_attention(
    recorder: CheckRecorder, session: ScoringSession, learning: LearnerGroup, reward_model: NetworkSpec | None
) -> None:
    """Checks attention with the head and kernel block sizes of each network in a run; a collective over all hosts."""
    mesh, device, policy = session.mesh, session.mesh.devices.flat[0], session.model_spec.architecture
    rows = longest_rows(session, learning, reward_model)
    # Prefill uses the same attention.
    rows.append((policy, session.settings.data.max_prompt_length))
    dtype, slots = set_compute_dtype(session.settings), slot_shapes(session.settings, 1, setting="rollout.slots")
    with jax.set_mesh(mesh):
        compared = dict.fromkeys((network, architecture_blocking(network, tokens, dtype)) for network, tokens in rows)
        block = cache_block_size(policy, slots.max_length, dtype, is_large=slots.has_large_blocks)
        decode_block = decode_block_size(policy, block, dtype)
    has_kernel = decode_block is not None or any(blocking.kernel for _, blocking in compared)
    name = f"the kernel for {device.device_kind}" if has_kernel else f"attention on {device.platform} without a kernel"
    with recorder.run_check("attention", "set model.attention: xla" if has_kernel else ""):
        differences = np.array(
            [
                attention_differences(architecture, mesh, dtype, window=window, blocking=blocking)
                for architecture, blocking in compared
                for window in _windows(architecture)
            ]
        ).max(axis=0)
        decoding = [
            decode_attention_errors(policy, mesh, dtype, window=window, block=block, block_size=decode_block)
            for window in _windows(policy)
        ]
        differences = np.concatenate([differences, np.max(decoding, axis=0)])
        tolerance, worst = TOLERANCES[dtype.name], int(differences.argmax())
        if differences[worst] <= tolerance:
            found = f"equals dense attention of single rows within {differences[worst]:.1e} of the largest number"
            recorder.ok(
                "attention", f"{name} {found} ({tolerance:g} is allowed in {dtype}): output, gradients, decoding"
            )
        else:
            found = f"{RESULTS[worst]} differs from that of dense attention by {differences[worst]:.1e} of its largest"
            advice = "set model.attention: xla" if has_kernel else "report this with the versions above"
            recorder.fail("attention", f"{name}: {found} number; {tolerance:g} is allowed in {dtype}", advice)


def longest_samples(num_samples: int, *, prompt: int, completion: int) -> list[Sample]:
    """Returns samples with these numbers of prompt and completion tokens; all token ids are 0."""
    tokens = np.zeros(completion, np.int32)
    sample = Sample(Prompt("longest", np.zeros(prompt, np.int32), "", None), 0, 0, tokens, "", tokens, "length", 0)
    return [sample] * num_samples


def _windows(architecture: Architecture) -> tuple[int | None, ...]:
    return (None, WINDOW) if any(architecture.windows) else (None,)


def attention_differences(
    architecture: Architecture, mesh: Mesh, dtype: jnp.dtype, *, window: int | None, blocking: Blocking
) -> Float64[np.ndarray, "4"]:
    """Returns the largest difference of each of the first four `RESULTS` from dense attention in float32.

    Differences are relative to the largest magnitude in each result. Inputs are random: a packed row contains the
    samples of `SAMPLE_PLACES` and padding; dense attention computes one row per sample. Every device computes the same
    row. All hosts must call it together.
    """
    a, score_mod = architecture, ScoreMod.of(architecture)
    row = MicroBatch((((0, 1), (2,)),), RowShape(NUM_TOKENS, 3 * COMPLETION))
    layout = pack_tokens(longest_samples(3, prompt=PROMPT, completion=COMPLETION), row).layout
    is_token = (layout.segment_ids != 0)[:, :, None, None]
    by_token, by_key = (1, NUM_TOKENS, a.num_query_heads, a.head_dim), (1, a.num_kv_heads, NUM_TOKENS, a.head_dim)
    rng = np.random.default_rng(0)
    query, keys, values, weights = (rng.standard_normal(shape) for shape in (by_token, by_key, by_key, by_token))
    # Some scores reach the soft cap.
    query *= (score_mod.soft_cap or 1.0) ** 0.5
    arrays = [x.astype(dtype) for x in (query, keys, values, weights * is_token)]

    def packed(layout: SegmentLayout, query: Array, keys: Array, values: Array) -> Array:
        return packed_attention(query, keys, values, layout, window=window, score_mod=score_mod, blocking=blocking)

    def alone(_: SegmentLayout, query: Array, keys: Array, values: Array) -> Array:
        mixed = jnp.zeros_like(query)
        for places in SAMPLE_PLACES:
            single = single_segment_layout(jnp.ones((1, len(places)), bool))
            mask = attention_mask(single, single, 0, window)
            own = query[:, places], keys[:, :, places], values[:, :, places]
            # `set` overwrites the output of a shared prompt, so only its last sample has the prompt's gradient.
            mixed = mixed.at[:, places].set(dot_product_attention(*own, mask, score_mod))
        return mixed

    def results(attention: Callable[..., Array], layout: SegmentLayout, *arrays: Array) -> list[Array]:
        mixed, pull = jax.vjp(partial(attention, layout), *arrays[:3])
        return [jnp.where(is_token, mixed, 0), *pull(arrays[3])]

    rows = jax.tree.map(lambda x: np.repeat(x, num_local_row_shards(mesh), axis=0), (layout, *arrays))
    with jax.set_mesh(mesh):
        ours = jax.jit(partial(results, packed), out_shardings=row_sharding(mesh))(*to_global(mesh, rows))
    with jax.default_matmul_precision("highest"):
        exact = jax.jit(partial(results, alone))(layout, *(x.astype(np.float32) for x in arrays))
    return _largest_differences([*map(to_local, ours)], exact)


def decode_attention_errors(
    architecture: Architecture,
    mesh: Mesh,
    dtype: jnp.dtype,
    *,
    window: int | None,
    block: int,
    block_size: int | None,
) -> Float64[np.ndarray, "3"]:
    """Returns the largest difference of each of the last three `RESULTS` from dense attention in float32.

    Differences are relative to the largest magnitude in each result. Each row decodes one token; every device has the
    same rows and KV caches. All hosts must call it together.

    Args:
        window: length of the attention window; None without one.
        block: number of tokens in a KV block; dense attention uses caches that are not divided into blocks.
        block_size: number of tokens in a block of the decoding kernel; None if XLA computes decoding.
    """
    a, score_mod = architecture, ScoreMod.of(architecture)
    positions = np.array([0, PROMPT, NUM_TOKENS // 2, NUM_TOKENS - 1], np.int32)
    # The first row has the last blocks.
    tables = np.arange(len(positions) * -(-NUM_TOKENS // block), dtype=np.int32)[::-1].reshape(len(positions), -1)
    new, pool = (len(positions), a.num_kv_heads, 1, a.head_dim), (tables.size, a.num_kv_heads, block, a.head_dim)
    shapes, rng = ((len(positions), 1, a.num_query_heads, a.head_dim), new, new, pool, pool), np.random.default_rng(0)
    *new, keys, values = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    places = np.arange(tables.shape[1] * block)
    # Cache entries after the new token are not used.
    seen = places <= positions[:, None]

    def whole_rows(pools: np.ndarray) -> Float[np.ndarray, "D B K S H"]:
        """Joins the KV blocks of each row on each device; every device numbers its blocks from 0."""
        rows = np.moveaxis(pools.reshape(-1, *pool)[:, tables], 2, 3)
        return np.where(seen[:, None, :, None], rows.reshape(*rows.shape[:3], -1, a.head_dim), 0)

    def in_blocks(positions: Array, tables: Array, *arrays: Any) -> list[Array]:
        query, key, value, keys, values = arrays
        inputs: Any = query, key, value, LayerCache(keys, values), positions, jnp.ones_like(positions, bool), tables
        mixed, cache = extend_cache(*inputs, window=window, score_mod=score_mod, block_size=block_size)
        return [mixed, cache.keys, cache.values]

    def in_one_piece(positions: Array, query: Array, key: Array, value: Array, *cache: Array) -> list[Array]:
        write = jax.vmap(lambda row, new, position: row.at[:, position].set(new[:, 0]))
        keys, values = (write(x, new, positions) for x, new in zip(cache, (key, value), strict=True))
        visible = jnp.asarray(seen if window is None else seen & (places > positions[:, None] - window))
        return [dot_product_attention(query, keys, values, visible[:, None], score_mod), keys, values]

    given = positions, tables, *new, keys, values
    rows = [np.tile(x, (num_local_row_shards(mesh), *[1] * (x.ndim - 1))) for x in given]
    with jax.set_mesh(mesh):
        compute = jax.jit(in_blocks, out_shardings=row_sharding(mesh))
        mixed, *caches = map(to_local, compute(*to_global(mesh, rows)))
    with jax.default_matmul_precision("highest"):
        exact_inputs = (*new, whole_rows(keys)[0], whole_rows(values)[0])
        exact = jax.jit(in_one_piece)(positions, *(x.astype(np.float32) for x in exact_inputs))
    return _largest_differences([mixed, *map(whole_rows, caches)], exact)


def _largest_differences(ours: Sequence[np.ndarray], exact: Sequence[Any]) -> Float64[np.ndarray, "results"]:
    """Returns the largest difference in each array on any device, relative to the largest magnitude in `exact`."""
    found = []
    for x, y in zip(ours, map(np.asarray, exact), strict=True):
        difference = np.abs(np.float64(x).reshape(-1, *y.shape) - y)
        found.append(difference.max() / np.abs(y).max())
    return np.array(found)
