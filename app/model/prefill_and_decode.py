"""Prefill of prompts into a KV cache, then decoding of one new token per slot at a time.

Entry s of a cached row belongs to the token at position s. A right-padded prompt leaves undefined entries after its
last token. Decoding overwrites them before they become visible, since a token sees only entries up to its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int32

from app.mesh.axis_rules import constrain
from app.model.attention.cached import decode_block_size, extend_cache
from app.model.attention.dense import ScoreMod
from app.model.decode_weights import DecodeWeights
from app.model.decoder import Decoder, DecoderDefinition, Params, gather_tokens
from app.model.kv_cache import KVCache, LayerCache, constrain_cache
from app.model.segment_layout import single_segment_layout

DECODE_SCOPE = "decode"
"""The name scope of the loop over tokens in compiled programs."""


PROJECTED_DIMS = ("rows", "tokens", "query_heads", "head")
"""Logical dims of queries and attention outputs outside attention, where the projections determine the sharding."""


def _run_layers(
    decoder: Decoder,
    weights: DecodeWeights,
    token_ids: Int32[Array, "B T"],
    positions: Int32[Array, "B T"],
    cache: KVCache | None,
    is_token: Bool[Array, "B T"],
    attend: Callable[[int | None, LayerCache | None, Array, Array, Array], tuple[Array, LayerCache]],
) -> tuple[Float[Array, "B T D"], KVCache, Int32[Array, "L B T k"] | None]:
    """Returns the normalized hidden states, the new cache, and the routes if there are experts.

    Args:
        attend: (window, old cache, query, keys, values) -> a layer's attention and its new cache.
    """
    block_graph, _ = nnx.split(decoder.blocks)
    whole, windowed = decoder.angles(positions)
    x = decoder.embed(token_ids, weights.params["embedding"].dtype)

    # Layers with the same window are traced once (30 layers in 0.15 s instead of 1.2). After inlining, the program is
    # the same as with separate traces.
    @functools.partial(jax.jit, static_argnums=0, inline=True)
    def run_layer(
        window: int | None, old: LayerCache | None, params: Params, x: Array
    ) -> tuple[Array, LayerCache, Array | None]:
        angles = whole if window is None else windowed
        return nnx.merge(block_graph, params)(x, angles, functools.partial(attend, window, old), is_token)

    new, routes = [], []
    windows = decoder.architecture.layer_windows
    for window, old, params in zip(windows, cache or (None,) * len(windows), weights.blocks, strict=True):
        x, kept, chosen = run_layer(window, old, params, x)
        new.append(kept)
        routes.append(chosen)
    has_routes = decoder.architecture.num_experts is not None
    hidden = gather_tokens(decoder.final_norm(x)).reshape(x.shape)
    return hidden, tuple(new), jnp.stack(routes) if has_routes else None


def prefill(
    definition: DecoderDefinition,
    weights: DecodeWeights,
    token_ids: Int32[Array, "P S"],
    lengths: Int32[Array, "P"],
) -> tuple[Float[Array, "P D"], KVCache, Int32[Array, "L P S k"] | None]:
    """Returns the hidden state of the last token of each right-padded prompt, the cache, and the routes of all tokens.

    Routes are None for a model without experts.
    """
    decoder = definition.bind(weights.params)
    slots = jnp.arange(token_ids.shape[1])[None, :]
    is_token = slots < lengths[:, None]
    layout = single_segment_layout(is_token)
    attention = decoder.attention_over(layout, weights.params["embedding"].dtype)

    def attend(
        window: int | None, _: LayerCache | None, query: Array, keys: Array, values: Array
    ) -> tuple[Array, LayerCache]:
        return attention(query, keys, values, window=window), LayerCache(keys, values)

    hidden, cache, routes = _run_layers(decoder, weights, token_ids, layout.positions, None, is_token, attend)
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(hidden, last, axis=1)[:, 0], constrain_cache(cache), routes


def decode_step(
    definition: DecoderDefinition,
    weights: DecodeWeights,
    cache: KVCache,
    token_ids: Int32[Array, "B"],
    positions: Int32[Array, "B"],
    active: Bool[Array, "B"],
    tables: Int32[Array, "B M"],
) -> tuple[Float[Array, "B D"], KVCache, Int32[Array, "L B k"] | None]:
    """Runs the network on one token per slot; returns the hidden states, the updated cache, and the routes.

    Routes are None for a model without experts.

    Args:
        active: rows whose results are used; other results are undefined.
        tables: the blocks of each slot; see `extend_cache`.
    """
    decoder, score_mod = definition.bind(weights.params), ScoreMod.of(definition.architecture)
    length, dtype = cache[0].keys.shape[2], weights.params["embedding"].dtype
    block_size = decode_block_size(definition.architecture, length, dtype)

    def attend(
        window: int | None, old: LayerCache | None, query: Array, key: Array, value: Array
    ) -> tuple[Array, LayerCache]:
        assert old is not None
        rules = {"window": window, "score_mod": score_mod, "block_size": block_size}
        # Otherwise XLA may move weights between the devices along tp instead of rows.
        query = constrain(query, *PROJECTED_DIMS)
        mixed, extended = extend_cache(query, key, value, old, positions, active, tables, **rules)
        return constrain(mixed, *PROJECTED_DIMS), extended

    hidden, cache, routes = _run_layers(
        decoder, weights, token_ids[:, None], positions[:, None], cache, active[:, None], attend
    )
    return hidden[:, 0], cache, None if routes is None else routes[:, :, 0]
