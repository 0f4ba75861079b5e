"""Mixtures of experts: gated MLPs, of which a router chooses a few for each token.

Tokens are sorted by expert, multiplied group by group, and summed per token in float32. No token is dropped, and all
sums have a fixed order, so that results are bitwise repeatable. A token's routes (its experts in each layer) are
recorded by the sampler and replayed by the trainer.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks"; Jiang et al. 2024, "Mixtral of Experts", section 2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from app.mesh.axis_rules import shard_map_by_dims
from app.model.architecture import Architecture, RouteShape
from app.model.grouped_product import grouped_product
from app.model.layers import ACTIVATIONS, PROJECTION_CHECKPOINT_NAME, keep_result, make_param

UNRECORDED = 255
"""Marks a layer in a token's routes as not recorded: all k entries have this value."""


class ExpertDispatch(NamedTuple):
    """Describes how the copies of tokens, one per chosen expert, are sorted by expert."""

    order: Int32[Array, "M"]
    """Index of the copy at each sorted position; token n has the copies n k to (n + 1) k - 1."""
    back: Int32[Array, "M"]
    """Sorted position of each copy: the inverse of `order`."""
    num_used: Int32[Array, ""]
    """Number of copies for this device's experts; they are sorted first, and results for the others are undefined."""


class ExpertMatrix(nnx.Module):
    """The weights of one projection in all experts, stacked; input dims come before output dims."""

    def __init__(self, rngs: nnx.Rngs, sizes: dict[str, int]):
        self.kernel = make_param(rngs, sizes)


class Experts(nnx.Module):
    """The sum over a token's chosen experts of p down(act(gate(x)) * up(x)), with the router's probabilities p.

    The experts are split over tp: each device sums its experts' outputs for all tokens of its rows, and one all-reduce
    over tp adds these sums. The router is frozen. Its choices are discontinuous: rounding alone sends tokens to other
    experts in the sampler than in the trainer, and training the router would change further choices in each update, so
    that importance ratios would become meaningless. Replaying the sampler's choices removes the first effect.
    Source: Ma et al. 2025, arXiv 2510.11370.
    """

    def __init__(self, arch: Architecture, rngs: nnx.Rngs, *, stack: dict[str, int]):
        assert arch.num_experts is not None
        self.architecture = arch
        outer = {**stack, "experts": arch.num_experts}
        embed, mlp = {"embed": arch.model_dim}, {"expert_mlp": arch.mlp_dim}
        self.router = make_param(rngs, {**stack, "routes": arch.num_experts, **embed})
        self.gate = ExpertMatrix(rngs, {**outer, **embed, **mlp})
        self.up = ExpertMatrix(rngs, {**outer, **embed, **mlp})
        self.down = ExpertMatrix(rngs, {**outer, **mlp, **embed})

    def __call__(
        self, x: Float[Array, "*tokens D"], is_token: Bool[Array, "R T"], recorded: UInt8[Array, "R T k"] | None = None
    ) -> tuple[Float[Array, "*tokens D"], Int32[Array, "R T k"]]:
        """Returns each token's weighted sum of expert outputs, and the experts that the router itself chose.

        Where `is_token` is False, the sums are 0 and the choices undefined.

        Args:
            recorded: experts to use instead of the router's choices; `UNRECORDED` keeps the router's choice.
        """
        rows, routes, split = ("rows", "activation"), ("rows", "routes"), "experts"
        weights = {
            # Rounded as in the decode weights, so that sampler and trainer route by the same numbers.
            "router": jax.lax.stop_gradient(self.router[...].astype(x.dtype)),
            **{name: getattr(self, name).kernel[...].astype(x.dtype) for name in ("gate", "up", "down")},
            # A device's part contains the indices of its experts.
            "ids": jnp.arange(self.architecture.num_experts),
        }
        inward, outward = (split, "activation", "expert_mlp"), (split, "expert_mlp", "activation")
        weight_dims = {
            "router": ("routes", "activation"),
            "gate": inward,
            "up": inward,
            "down": outward,
            "ids": (split,),
        }
        add_own = shard_map_by_dims(
            functools.partial(_add_own_experts, self.architecture),
            in_dims=(rows, rows[:1], weight_dims, None if recorded is None else routes),
            # The first dim has one entry for each part of the experts.
            out_dims=((split, *rows), routes),
        )
        flat = None if recorded is None else recorded.reshape(-1, recorded.shape[-1])
        parts, live = add_own(x.reshape(-1, x.shape[-1]), is_token.reshape(-1), weights, flat)
        # Not `jnp.sum`, which would send float32 between devices, and not `lax.reduce` from a traced zero, whose
        # gradient is a tree of slices: two more exchanges over tp.
        return jax.lax.reduce_sum(parts, (0,)).reshape(x.shape), live.reshape(*is_token.shape, -1)


def _add_own_experts(
    arch: Architecture,
    x: Float[Array, "T D"],
    is_token: Bool[Array, "T"],
    weights: dict[str, Array],
    recorded: UInt8[Array, "T k"] | None,
) -> tuple[Float[Array, "1 T D"], Int32[Array, "T k"]]:
    """Returns the contribution of this device's experts to its tokens, and the router's choices."""
    ids = weights["ids"]
    probabilities, chosen, live = choose_experts(arch, x, weights["router"], recorded)
    is_own = is_token[:, None] & (chosen >= ids[0]) & (chosen <= ids[-1])
    # Copies for other devices' experts and of padding come after all groups.
    groups = jnp.where(is_own, chosen - ids[0], len(ids)).reshape(-1)
    order = jnp.argsort(groups, stable=True)
    sizes = jnp.sum(groups[:, None] == jnp.arange(len(ids)), axis=0, dtype=jnp.int32)
    places = ExpertDispatch(order, jnp.argsort(order), jnp.sum(sizes))
    y = dispatch(x, arch.experts_per_token, places)
    gate, up = (
        keep_result(grouped_product(y, weights[name], sizes), PROJECTION_CHECKPOINT_NAME) for name in ("gate", "up")
    )
    # Apply the probability before `down`, so that its gradient does not need the output, which is k times as wide.
    factors = dispatch(probabilities.reshape(-1, 1), 1, places)
    gated = (ACTIVATIONS[arch.activation](gate) * up * factors).astype(x.dtype)
    mixed: Array = combine(grouped_product(gated, weights["down"], sizes), arch.experts_per_token, places)
    return mixed[None], live


def choose_experts(
    arch: Architecture,
    x: Float[Array, "T D"],
    router: Float[Array, "E D"],
    recorded: UInt8[Array, "T k"] | None = None,
) -> tuple[Float[Array, "T k"], Int32[Array, "T k"], Int32[Array, "T k"]]:
    """Returns the probabilities of each token's chosen experts, in the dtype of `x`; these experts; and the likeliest.

    The chosen experts are the recorded ones, or else the likeliest ones. The softmax is over all experts, in float32;
    in some families, the probabilities of the chosen experts are normalized to sum to 1.
    """
    logits = jnp.einsum("nd,ed->ne", *(a.astype(jnp.float32) for a in (x, router)), precision=jax.lax.Precision.HIGHEST)
    probabilities: Float32[Array, "T E"] = jax.nn.softmax(logits)
    _, live = jax.lax.top_k(jax.lax.stop_gradient(probabilities), arch.experts_per_token)
    chosen = live if recorded is None else jnp.where(recorded == UNRECORDED, live, recorded.astype(live.dtype))
    # Not a gather, because its gradient would be a scatter-add.
    is_chosen = chosen[:, :, None] == jnp.arange(len(router))
    kept = jnp.sum(jnp.where(is_chosen, probabilities[:, None], 0), axis=-1)
    if arch.normalized_routing:
        kept = kept / jnp.sum(kept, axis=-1, keepdims=True)
    return kept.astype(x.dtype), chosen, live


def pack_routes(chosen: Int32[Array, "L *rows k"]) -> Int32[Array, "*rows W"]:
    """Packs the routes of each token into 32-bit words, layer by layer, with one byte per choice."""
    by_token = jnp.moveaxis(chosen, 0, -2)
    flat = by_token.reshape(*by_token.shape[:-2], -1).astype(jnp.uint8)
    padded = jnp.pad(flat, [(0, 0)] * (flat.ndim - 1) + [(0, -flat.shape[-1] % 4)])
    return jax.lax.bitcast_convert_type(padded.reshape(*flat.shape[:-1], -1, 4), jnp.int32)


def unpack_routes(words: Int32[np.ndarray, "*rows W"], shape: RouteShape) -> UInt8[np.ndarray, "*rows L k"]:
    """Returns the routes of each token; the inverse of `pack_routes`."""
    flat = np.ascontiguousarray(words).view(np.uint8)
    return flat[..., : shape.num_layers * shape.experts_per_token].reshape(*words.shape[:-1], *shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def dispatch(x: Float[Array, "T D"], copies: int, places: ExpertDispatch) -> Float[Array, "M D"]:
    """Returns copies of each row, sorted by expert: y[m] = x[order[m] // copies]. Its gradient is `combine`."""
    return x[places.order // copies]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def combine(y: Float[Array, "M D"], copies: int, places: ExpertDispatch) -> Float[Array, "T D"]:
    """Returns the sum of the used copies of each row, added in float32. Its gradient is `dispatch`."""
    used = jnp.where((places.back < places.num_used)[:, None], y[places.back], 0)
    return jnp.sum(used.reshape(-1, copies, y.shape[1]), axis=1, dtype=jnp.float32).astype(y.dtype)


# JAX's own gradient of a gather is a scatter-add.
dispatch.defvjp(
    lambda x, copies, places: (dispatch(x, copies, places), places),
    lambda copies, places, dy: (combine(dy, copies, places), None),
)
combine.defvjp(
    lambda y, copies, places: (combine(y, copies, places), places),
    lambda copies, places, dx: (dispatch(dx, copies, places), None),
)
