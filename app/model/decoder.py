"""The network: one pre-norm decoder for every family, described with Flax NNX and run as plain pytrees.

Each weight is declared once, with its shape and logical dims, which `app.mesh.axis_rules` maps to shardings. Layers are
stacked on a leading L dim and scanned, so compile time does not grow with depth. Families differ only in their
`Architecture`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt8

from app.mesh.axis_rules import Dims, constrain, reshard, row_shard_size, sharding_tree, spread_rows
from app.model.architecture import Architecture
from app.model.attention.blockwise import ATTENTION_CHECKPOINT_NAME
from app.model.attention.dense import ScoreMod, apply_soft_cap
from app.model.attention.packed import architecture_blocking, make_block_pairs, packed_attention
from app.model.attention.pairs import UNREACHABLE
from app.model.experts import Experts
from app.model.layers import (
    ACTIVATIONS,
    PROJECTION_CHECKPOINT_NAME,
    Projection,
    RMSNorm,
    apply_rope,
    contract_last_dims,
    identity,
    make_param,
    rope_frequencies,
)
from app.model.lora import LoRAConfig, LoRAParam, ParamPath, Params, flatten_by_path
from app.model.quantization import CODES, SCALES, KernelQuantizer
from app.model.segment_layout import SegmentLayout
from settings.schema.model import Quantization

AttentionFn = Callable[[Array, Array, Array], tuple[Array, Any]]
"""(query [R,T,Q,H], keys [R,K,T,H], values [R,K,T,H]) -> (attention output [R,T,Q,H], data for the caller)."""


RESIDUALS = ("rows", "residual_tokens", "activation")


def gather_tokens(x: Float[Array, "R T D"]) -> Float[Array, "*tokens D"]:
    """Returns a sublayer's input from residuals: all-gathers tokens over tp, and reduce-scatters their gradient.

    Rows and tokens are merged into one dim if each device has one row: on TPUs, XLA does not reduce-scatter tokens
    behind a dim of size 1.
    """
    if not _is_split():
        return x
    if row_shard_size(len(x)) == 1:
        x = x.reshape(-1, x.shape[-1])
    whole, split = _token_dims(x)
    return reshard(x, split, whole)


def scatter_tokens(x: Float[Array, "*tokens D"], shape: tuple[int, ...]) -> Float[Array, "R T D"]:
    """Returns a sublayer's addition to residuals: reduce-scatters tokens over tp, and all-gathers their gradient."""
    if not _is_split():
        return x
    whole, split = _token_dims(x)
    moved: Array = reshard(x, whole, split)
    return moved.reshape(shape)


def _is_split() -> bool:
    """Returns whether tp is larger than 1; otherwise, sharding constraints would only prevent fusion."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape["tp"] > 1


def _token_dims(x: Float[Array, "*tokens D"]) -> tuple[Dims, Dims]:
    """Returns the logical dims of `x` with whole rows, and with tokens split over tp, as in residuals."""
    if x.ndim == 2:
        return ("rows", "activation"), (spread_rows(len(x)), "activation")
    return ("rows", "tokens", "activation"), RESIDUALS


class Block(nnx.Module):
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)).

    Some families have experts in place of the MLP, normalize queries and keys per head, or normalize the outputs of
    attention and MLP before adding them.

    tp splits attention by heads, the MLP by its inner dim, and residuals and their norms by tokens, so that saved
    activations are also split. Segments and masks cover whole rows. Source: Korthikanti et al. 2022, arXiv 2205.05198,
    section 4.2.2.
    """

    def __init__(
        self,
        arch: Architecture,
        rngs: nnx.Rngs,
        lora: LoRAConfig | None,
        quantization: Quantization | None,
        outputs_first: bool,
    ):
        stack = {"layers": arch.num_layers}
        embed = {"embed": arch.model_dim}
        head = {"head": arch.head_dim}
        heads = {"query_heads": arch.num_query_heads, **head}
        kv_heads = {"kv_heads": arch.num_kv_heads, **head}
        mlp = {"mlp": arch.mlp_dim}
        norm = functools.partial(RMSNorm, arch, rngs, stack=stack)

        def project(name: str, inputs: dict[str, int], outputs: dict[str, int], *, bias: bool) -> Projection:
            adapter = lora if lora and name in lora.projections else None
            stored: Any = {"lora": adapter, "quantization": quantization, "outputs_first": outputs_first}
            return Projection(rngs, inputs, outputs, bias=bias, stack=stack, **stored)

        self.activation = arch.activation
        self.attention_norm = norm(embed)
        self.query = project("q_proj", embed, heads, bias=arch.qkv_bias)
        self.key = project("k_proj", embed, kv_heads, bias=arch.qkv_bias)
        self.value = project("v_proj", embed, kv_heads, bias=arch.qkv_bias)
        self.query_norm = norm(head) if arch.query_key_norms else identity
        self.key_norm = norm(head) if arch.query_key_norms else identity
        self.attention_output = project("o_proj", heads, embed, bias=arch.attention_output_bias)
        self.attention_post_norm = norm(embed) if arch.post_norms else identity
        self.mlp_norm = norm(embed)
        if arch.num_experts is None:
            self.gate = project("gate_proj", embed, mlp, bias=arch.mlp_bias)
            self.up = project("up_proj", embed, mlp, bias=arch.mlp_bias)
            self.down = project("down_proj", mlp, embed, bias=arch.mlp_bias)
        else:
            self.experts = Experts(arch, rngs, stack=stack)
        self.mlp_post_norm = norm(embed) if arch.post_norms else identity

    def __call__(
        self,
        x: Float[Array, "R T D"],
        angles: Float[Array, "2 R T half"],
        attend: AttentionFn,
        is_token: Bool[Array, "R T"],
        recorded: UInt8[Array, "R T k"] | None = None,
    ) -> tuple[Float[Array, "R T D"], Any, Int32[Array, "R T k"] | None]:
        """Returns the new residuals, the data that `attend` returned, and the router's choices (None without experts).

        Results on padding are undefined, and padding may be left out. For `recorded` see `Experts`.
        """
        y = gather_tokens(self.attention_norm(x))
        query, key, value = (project(y) for project in (self.query, self.key, self.value))
        query, key, value = (one.reshape(*x.shape[:2], *one.shape[-2:]) for one in (query, key, value))
        query, key = apply_rope(self.query_norm(query), angles), apply_rope(self.key_norm(key), angles)
        # The cache and all attention kernels have heads before tokens.
        mixed, kept = attend(query, key.swapaxes(1, 2), value.swapaxes(1, 2))
        mixed = self.attention_output(mixed.reshape(*y.shape[:-1], *mixed.shape[-2:]))
        x = x + self.attention_post_norm(scatter_tokens(mixed, x.shape))
        y = gather_tokens(self.mlp_norm(x))
        if hasattr(self, "experts"):
            mixed, live = self.experts(y, is_token, recorded)
        else:
            live = None
            # Otherwise XLA gathers the weights over tp instead of the tokens.
            inner = ACTIVATIONS[self.activation](self.gate(y)) * self.up(y)
            mixed = self.down(constrain(inner, *("rows", "tokens")[: y.ndim - 1], "mlp") if _is_split() else inner)
        return constrain(x + self.mlp_post_norm(scatter_tokens(mixed, x.shape)), *RESIDUALS), kept, live


REMAT_POLICIES: Mapping[str, Callable[[Callable], Callable]] = MappingProxyType(
    {
        "none": lambda layer: layer,
        "minimal": functools.partial(
            jax.checkpoint,
            policy=jax.checkpoint_policies.save_only_these_names(PROJECTION_CHECKPOINT_NAME, ATTENTION_CHECKPOINT_NAME),
            prevent_cse=False,
        ),
        "block": functools.partial(jax.checkpoint, prevent_cse=False),
    }
)
"""Value of `remat` -> wrapper of a layer, which determines what the backward pass recomputes.

`none`: nothing. `minimal`: everything except projection outputs (adapters included) and the attention of long rows, so
no [tokens, tokens] array or elementwise result is kept. `block`: everything except the layer's input.
`prevent_cse` is not needed, since the forward and the backward scan are separate loops."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["table"], meta_fields=["soft_cap", "outputs_first"])
@dataclass(frozen=True)
class LMHead:
    """The map from final hidden states to logits."""

    table: Float[Array, "V D"]
    soft_cap: float | None = None
    outputs_first: bool = False
    """Whether the table is the first factor of the matmul; see `contract_last_dims`."""

    def logits(self, hidden: Float[Array, "*rows D"]) -> Float32[Array, "*rows V"]:
        """Returns hidden @ table^T in float32, soft-capped if the family caps its logits."""
        table = self.table.astype(hidden.dtype)
        if self.outputs_first:
            logits = contract_last_dims(hidden, table, num_dims=1)
        else:
            logits = jnp.einsum("...d,vd->...v", hidden, table, preferred_element_type=jnp.float32)
        return apply_soft_cap(logits, self.soft_cap)


class Trunk(nnx.Module):
    """Token embedding, L layers and final norm: the part that all networks of a family share."""

    def __init__(
        self,
        arch: Architecture,
        rngs: nnx.Rngs,
        lora: LoRAConfig | None = None,
        quantization: Quantization | None = None,
        outputs_first: bool = False,
    ):
        self.architecture, self.outputs_first = arch, outputs_first
        self.embedding = make_param(rngs, {"vocab": arch.vocab_size, "embed": arch.model_dim})
        self.blocks = Block(arch, rngs, lora, quantization, outputs_first)
        self.final_norm = RMSNorm(arch, rngs, {"embed": arch.model_dim}, stack={})
        self.make_head(arch, rngs)

    def make_head(self, arch: Architecture, rngs: nnx.Rngs) -> None:
        """Adds the parameters of the head; a bare trunk has none."""

    def embed(self, token_ids: Int32[Array, "R T"], dtype: jnp.dtype) -> Float[Array, "R T D"]:
        """Returns the embeddings of tokens from a table whose model dim is not split."""
        # Gather along the model dim before the look-up; otherwise the result would be split over fsdp twice.
        return self._scaled_embeddings(constrain(self.embedding[...].astype(dtype), "vocab", "activation")[token_ids])

    def embed_from_shards(self, token_ids: Int32[Array, "R T"], dtype: jnp.dtype) -> Float[Array, "R T D"]:
        """Returns the embeddings of tokens; no device holds the whole table or its gradient.

        Each device looks up its part of the model dim for the rows of all devices that share the table.
        """
        shared = constrain(token_ids, "shared_rows", "tokens")
        return self._scaled_embeddings(
            constrain(self.embedding[...].astype(dtype)[shared], "shared_rows", "tokens", "embed")
        )

    def _scaled_embeddings(self, x: Float[Array, "R T D"]) -> Float[Array, "R T D"]:
        if self.architecture.scaled_embeddings:
            x = x * jnp.asarray(np.float32(self.architecture.model_dim**0.5), x.dtype)
        return constrain(x, *RESIDUALS)

    def angles(self, positions: Int32[Array, "R T"]) -> tuple[Float[Array, "2 R T half"], Float[Array, "2 R T half"]]:
        """Returns cosines and sines of the rotary angles, for full-attention layers and for windowed layers."""
        arch = self.architecture
        ropes = (arch.rope,) if arch.windowed_rope is None else (arch.rope, arch.windowed_rope)
        angles = [positions[..., None].astype(jnp.float32) * rope_frequencies(rope, arch.head_dim) for rope in ropes]
        turned = [jnp.stack([jnp.cos(angle), jnp.sin(angle)]) for angle in angles]
        return turned[0], turned[-1]

    def attention_over(self, layout: SegmentLayout, dtype: jnp.dtype) -> Callable[..., Float[Array, "R T Q H"]]:
        """Returns a function (query, keys, values, window) -> output of `packed_attention` over these rows."""
        arch = self.architecture
        blocking = architecture_blocking(arch, layout.segment_ids.shape[1], dtype)
        pairs = make_block_pairs(layout, dict.fromkeys(arch.layer_windows), blocking)
        how = {"layout": layout, "score_mod": ScoreMod.of(arch), "pairs": pairs, "blocking": blocking}
        return functools.partial(packed_attention, **how)

    def hidden(
        self, token_ids: Int32[Array, "R T"], layout: SegmentLayout, *, dtype: jnp.dtype, remat: str = "none"
    ) -> Float[Array, "R T D"]:
        """Returns the final hidden states of packed rows; see `hidden_and_routes`."""
        return self.hidden_and_routes(token_ids, layout, dtype=dtype, remat=remat)[0]

    def hidden_and_routes(
        self,
        token_ids: Int32[Array, "R T"],
        layout: SegmentLayout,
        *,
        recorded: UInt8[Array, "R T L k"] | None = None,
        dtype: jnp.dtype,
        remat: str,
    ) -> tuple[Float[Array, "R T D"], Int32[Array, "L R T k"] | None]:
        """Returns the final hidden states of packed rows, the head's input; hidden[:, t] predicts token t+1.

        The second result contains the routers' choices; it is None without experts.

        Args:
            recorded: the routes to replay; see `Experts`.
            dtype: compute dtype; softmax, norms and rotations are float32.
            remat: what the backward pass recomputes; see `REMAT_POLICIES`.
        """
        arch = self.architecture
        graph, stacked = nnx.split(self.blocks)
        whole, windowed = self.angles(layout.positions)
        attention = self.attention_over(layout, dtype)
        # Scanned with the weights, so that one body serves layers with and without a window.
        windows = jnp.array([w or UNREACHABLE for w in arch.windows], jnp.int32) if arch.windows else None
        is_token = layout.segment_ids != 0

        routes = None if recorded is None else jnp.moveaxis(recorded, 2, 0)

        def layer(x: Array, one: tuple[nnx.State, Array | None, Array | None]) -> tuple[Array, Array | None]:
            weights, window, recorded = one
            two_ropes = arch.windowed_rope is not None and window is not None
            angles = jnp.where(window == UNREACHABLE, whole, windowed) if two_ropes else whole

            def attend(query: Array, key: Array, value: Array) -> tuple[Array, None]:
                return attention(query, key, value, window=window), None

            x, _, live = nnx.merge(graph, weights)(x, angles, attend, is_token, recorded)
            return x, live

        x = self.embed_from_shards(token_ids, dtype)
        x, live = jax.lax.scan(REMAT_POLICIES[remat](layer), x, (stacked, windows, routes))
        return gather_tokens(self.final_norm(x)).reshape(x.shape), live


class Decoder(Trunk):
    """A trunk and an LM head. With tied embeddings, the head uses the embedding matrix."""

    def make_head(self, arch: Architecture, rngs: nnx.Rngs) -> None:
        if not arch.tied_embeddings:
            self.output = make_param(rngs, {"vocab": arch.vocab_size, "embed": arch.model_dim})

    @property
    def head(self) -> LMHead:
        table = self.embedding[...] if self.architecture.tied_embeddings else self.output[...]
        return LMHead(table, self.architecture.logit_soft_cap, self.outputs_first)


class ValueDecoder(Trunk):
    """A trunk and a value head, which outputs a scalar per token. A new head is zeros, so all values start at 0."""

    def make_head(self, arch: Architecture, rngs: nnx.Rngs) -> None:
        self.value = make_param(rngs, {"embed": arch.model_dim}, init="zeros")

    def values(self, hidden: Float[Array, "*rows D"]) -> Float32[Array, "*rows"]:
        """Returns the dot products of hidden states with the value head, in float32."""
        head = self.value[...].astype(hidden.dtype)
        return jnp.einsum("...d,d->...", hidden, head, preferred_element_type=jnp.float32)


@dataclass(frozen=True)
class DecoderDefinition:
    """A network without its weights: the NNX graph, and the shape and logical dims of each parameter.

    Only this class converts between NNX modules and plain pytrees.
    """

    architecture: Architecture
    network_class: type[Trunk]
    graph: Any
    shapes: Params
    """Nested dict of `jax.ShapeDtypeStruct`."""
    dims: Params
    """A tree like `shapes`, with a tuple of logical dims at each leaf."""
    lora: LoRAConfig | None = None
    adapter_paths: frozenset[ParamPath] = frozenset()
    """Paths of the adapters, the only trainable weights; empty if all weights are trainable."""
    quantization: Quantization | None = None
    """Quantization of the kernels; None if they are float32."""
    outputs_first: bool = False
    """Whether kernels have their output dims first, for fast matmuls with few tokens on CPUs."""

    @classmethod
    def create(
        cls,
        arch: Architecture,
        network_class: type[Trunk] = Decoder,
        *,
        lora: LoRAConfig | None = None,
        quantization: Quantization | None = None,
        outputs_first: bool = False,
    ) -> DecoderDefinition:
        network = nnx.eval_shape(lambda: network_class(arch, nnx.Rngs(0), lora, quantization, outputs_first))
        graph, state = nnx.split(network)
        shapes = nnx.to_pure_dict(state)
        dims = unflatten_dict({path: variable.get_metadata()["dims"] for path, variable in nnx.to_flat_state(state)})
        adapters = frozenset(flatten_by_path(nnx.to_pure_dict(nnx.filter_state(state, LoRAParam))))
        return cls(arch, network_class, graph, shapes, dims, lora, adapters, quantization, outputs_first)

    @cached_property
    def unquantized(self) -> DecoderDefinition:
        """This network with float32 kernels instead of codes and scales."""
        return self if self.quantization is None else self.quantized(None)

    def quantized(self, quantization: Quantization | None) -> DecoderDefinition:
        """Returns this network with kernels quantized in the given way; None = float32 kernels."""
        return self.create(self.architecture, self.network_class, lora=self.lora, quantization=quantization)

    def quantizer(self, path: ParamPath) -> KernelQuantizer:
        """Returns the layout of the quantized kernel at a path that ends in `kernel`."""
        assert self.quantization is not None, f"{path} is not a parameter"
        dims = flatten_by_path(self.dims)
        codes, scales = (dims[*path[:-1], leaf][1:] for leaf in (CODES, SCALES))
        return KernelQuantizer(self.quantization, codes, scales)

    @cached_property
    def without_adapters(self) -> DecoderDefinition:
        """This network without adapters."""
        if self.lora is None:
            return self
        without = self.create(self.architecture, self.network_class, quantization=self.quantization)
        return replace(without, shapes=self.frozen(self.shapes))

    def with_outputs_first(self) -> DecoderDefinition:
        """Returns this network with the output dims of its kernels first."""
        assert self.quantization is None
        return self.create(self.architecture, self.network_class, lora=self.lora, outputs_first=True)

    def held_in(self, dtype: jnp.dtype) -> DecoderDefinition:
        """Returns this network with weights, except quantized kernels and adapters, stored in this compute dtype.

        For frozen weights, results stay the same, because the network casts weights to the compute dtype anyway.
        """
        flat = flatten_by_path(self.shapes)
        stored = {path for path in flat if path[-1] not in (CODES, SCALES)} - self.adapter_paths
        held = {path: jax.ShapeDtypeStruct(flat[path].shape, dtype) for path in stored}
        return replace(self, shapes=unflatten_dict(flat | held))

    def bind(self, params: Params) -> Any:
        """Returns the network module with these weights, for use inside a jitted function."""
        return nnx.merge(self.graph, params)

    def shardings(self, mesh: Mesh) -> Params:
        return sharding_tree(mesh, self.shapes, self.dims)

    def initialise(self, seed: int) -> Params:
        """Returns random float32 weights; adapters and quantized kernels are zeros."""
        network = self.network_class(self.architecture, nnx.Rngs(seed), self.lora, self.quantization)
        return nnx.to_pure_dict(nnx.split(network)[1])

    def trainable(self, tree: Params) -> Params:
        """Returns the trainable part of a tree like `shapes`: the adapters, or the whole tree without adapters."""
        return self._select(tree, self.adapter_paths) if self.adapter_paths else tree

    def frozen(self, tree: Params) -> Params:
        """Returns the frozen part of a tree like `shapes`; an empty tree without adapters."""
        return self._select(tree, flatten_by_path(tree).keys() - self.adapter_paths) if self.adapter_paths else {}

    def _select(self, tree: Params, paths: Set[ParamPath]) -> Params:
        return unflatten_dict({path: leaf for path, leaf in flatten_by_path(tree).items() if path in paths})

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.unquantized.shapes))

    @property
    def num_trainable(self) -> int:
        """The number of trainable parameters, including the routers of experts, whose gradients are zero."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.trainable(self.shapes)))
