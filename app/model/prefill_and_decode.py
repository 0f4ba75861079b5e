"""Incremental decoding: prefill of prompts into a cache of keys and values, then one new token per slot at a time.

Entry s of a cached row belongs to the token at position s. A right-padded prompt leaves undefined entries after its
last token. Decoding overwrites them before they become visible, since a token sees only entries up to its own.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from app.mesh.axis_rules import constrain, sharding_tree
from app.mesh.placement import abstract_arrays
from app.model.attention import cached_attention, make_block_pairs, packed_attention, platform_blocking
from app.model.decode_weights import DecodeWeights
from app.model.decoder import AttentionFn, Decoder, DecoderDefinition
from app.model.segment_layout import single_segment_layout

DECODE_SCOPE = "decode"
"""The name scope of the loop over tokens in compiled programs."""


class LayerCache(NamedTuple):
    """The keys and values of one layer."""

    keys: Float[Array, "B K S H"]
    values: Float[Array, "B K S H"]


KVCache = tuple[LayerCache, ...]
"""The caches of all layers: separate buffers, which a decode step updates in place."""


CACHE_DIMS = ("rows", "kv_heads", "tokens", "head")


def constrain_cache(cache: KVCache) -> KVCache:
    """Constrains the cache to the shardings of `CACHE_DIMS`."""
    return jax.tree.map(lambda x: constrain(x, *CACHE_DIMS), cache)


def abstract_cache(shapes: KVCache, mesh: Mesh) -> KVCache:
    """Returns a cache's shapes with the shardings of `constrain_cache`."""
    return abstract_arrays(shapes, sharding_tree(mesh, shapes, jax.tree.map(lambda _: CACHE_DIMS, shapes)))


def _run_layers(
    decoder: Decoder,
    weights: DecodeWeights,
    token_ids: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    attention_fns: Sequence[AttentionFn],
) -> tuple[Float[Array, "B T D"], KVCache]:
    block_graph, _ = nnx.split(decoder.blocks)
    whole, windowed = decoder.angles(positions)
    x = decoder.embed(token_ids, weights.params["embedding"].dtype)
    cache = []
    layers = zip(weights.blocks, decoder.architecture.layer_windows, attention_fns, strict=True)
    for params, window, attend in layers:
        x, kept = nnx.merge(block_graph, params)(x, whole if window is None else windowed, attend)
        cache.append(kept)
    return decoder.final_norm(x), tuple(cache)


def prefill(
    definition: DecoderDefinition,
    weights: DecodeWeights,
    token_ids: Int32[Array, "P S"],
    lengths: Int32[Array, "P"],
) -> tuple[Float[Array, "P D"], KVCache]:
    """Returns the hidden state of the last token of each right-padded prompt, and the cache."""
    decoder = definition.bind(weights.params)
    slots = jnp.arange(token_ids.shape[1])[None, :]
    layout = single_segment_layout(slots < lengths[:, None])
    arch, windows = definition.architecture, definition.architecture.layer_windows
    dtype = weights.params["embedding"].dtype
    blocking = platform_blocking(token_ids.shape[1], arch.head_dim, dtype, arch.attention_implementation)
    pairs = make_block_pairs(layout, windows, blocking)
    how = {"score_mod": decoder.score_mod, "pairs": pairs, "blocking": blocking}
    mix = functools.partial(packed_attention, layout=layout, **how)

    def attend_within(window: int | None) -> AttentionFn:
        def attend(query: Array, keys: Array, values: Array) -> tuple[Array, LayerCache]:
            return mix(query, keys, values, window=window), LayerCache(keys, values)

        return attend

    attends = [attend_within(window) for window in windows]
    hidden, cache = _run_layers(decoder, weights, token_ids, layout.positions, attends)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, last, axis=1)[:, 0], constrain_cache(cache)


def decode_step(
    definition: DecoderDefinition,
    weights: DecodeWeights,
    cache: KVCache,
    token_ids: Int32[Array, "B"],
    positions: Int32[Array, "B"],
) -> tuple[Float[Array, "B D"], KVCache]:
    """Decodes one token per slot at its position; returns the hidden states and the updated cache."""
    if weights.layout == "fsdp":
        # Makes the weights depend on the token: otherwise XLA would gather them all before the loop and keep them.
        weights, token_ids = jax.lax.optimization_barrier((weights, token_ids))
    decoder = definition.bind(weights.params)
    # With vmap the partitioner knows that slots are independent, so no slot moves between devices.
    write = jax.vmap(lambda row, new, position: row.at[:, position].set(new))

    def attend_with(layer: LayerCache, window: int | None) -> AttentionFn:
        def attend(query: Array, key: Array, value: Array) -> tuple[Array, LayerCache]:
            keys = write(layer.keys, key[:, :, 0], positions)
            values = write(layer.values, value[:, :, 0], positions)
            mixed = cached_attention(query, keys, values, positions, window=window, score_mod=decoder.score_mod)
            return mixed, LayerCache(keys, values)

        return attend

    attends = [attend_with(*one) for one in zip(cache, definition.architecture.layer_windows, strict=True)]
    hidden, cache = _run_layers(decoder, weights, token_ids[:, None], positions[:, None], attends)
    return hidden[:, 0], cache
