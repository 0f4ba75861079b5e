"""The compiled programs of the slot engine: a small set, compiled before the first rollout.

The KV cache is a pool of blocks that stays on each device and is updated in place. Each segment sends a block table and
a few integers per row to the devices.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Compiled, Lowered
from jaxtyping import Array, Bool, Int32

from app.mesh.axis_rules import LOGICAL_AXIS_RULES, current_device, shard_map_by_dims, sharding_tree
from app.mesh.compiler_options import compiler_options
from app.mesh.devices import device_platform
from app.mesh.placement import abstract_arrays, tree_shardings
from app.model.attention.cached import cache_block_size
from app.model.decode_weights import DecodeWeights, abstract_decode_weights
from app.model.decoder import DecoderDefinition
from app.model.experts import pack_routes
from app.model.kv_cache import (
    KVCache,
    abstract_cache,
    cache_dims,
    cache_shapes,
    num_cache_shards,
    to_codes,
)
from app.model.prefill_and_decode import prefill
from app.rollout.engine.segment import RowGroups, RowTable, SegmentDecoder
from app.rollout.engine.shapes import SlotShapes
from app.rollout.sampling.token_sampling import (
    Sampler,
    SamplingRules,
    sample_tokens,
    sample_tokens_truncated,
)
from app.rollout.scheduling.segment_limits import SegmentLimits
from settings.errors import InputError

MAX_COMPILING = 16
"""Maximum number of concurrent compilations, each of which takes memory."""


def prefill_blocks(
    definition: DecoderDefinition,
    records_routes: bool,
    weights: DecodeWeights,
    pool: KVCache,
    token_ids: Int32[Array, "P S"],
    lengths: Int32[Array, "P"],
    targets: Int32[Array, "P M"],
) -> tuple[KVCache, Int32[Array, "P S words"] | None]:
    """Prefills rows of tokens, and writes their keys and values to the blocks `targets` on their devices.

    Returns the pool and, if recorded, the experts that each token was routed to (see `pack_routes`).

    Args:
        targets: indices of M blocks per row; a block whose index is beyond the pool is not written.
    """
    _, fresh, routes = prefill(definition, weights, token_ids, lengths)

    if pool[0].key_scales is not None:
        fresh = tuple(map(to_codes, fresh))

    def write(pool: Array, fresh: Array, targets: Array) -> tuple[Array]:
        _, num_heads, size, *head_dim = pool.shape
        num_rows, num_blocks = targets.shape
        missing = num_blocks * size - fresh.shape[2]
        padded = jnp.pad(fresh, [(0, missing if axis == 2 else 0) for axis in range(fresh.ndim)])
        blocks = jnp.moveaxis(padded.reshape(num_rows, num_heads, num_blocks, size, *head_dim), 2, 1)
        return (pool.at[targets.reshape(-1)].set(blocks.reshape(-1, *pool.shape[1:]), mode="drop"),)

    words = pack_routes(routes) if records_routes and routes is not None else None
    return _map_pool(write, pool, fresh, targets), words


def copy_blocks(
    pool: KVCache, sources: Int32[Array, "n"], targets: Int32[Array, "n"], counts: Int32[Array, "D"]
) -> KVCache:
    """On each device, copies its first `counts` blocks from `sources` to `targets`; source -1 means zeros.

    No target may be the source of another copy.
    """

    def copy_together(pool: Array, sources: Array, targets: Array, counts: Array) -> tuple[Array]:
        blocks = _select_rows(sources < 0, 0, pool[jnp.maximum(sources, 0)])
        targets = jnp.where(jnp.arange(len(targets)) < counts[0], targets, len(pool))
        return (pool.at[targets].set(blocks, mode="drop"),)

    def copy(pool: Array, sources: Array, targets: Array, counts: Array) -> tuple[Array]:
        def copy_one(i: Array, pool: Array) -> Array:
            block = jax.lax.dynamic_slice_in_dim(pool, jnp.maximum(sources[i], 0), 1)
            block = jnp.where(sources[i] < 0, 0, block)
            return jax.lax.dynamic_update_slice_in_dim(pool, block, targets[i], 0)

        return (jax.lax.fori_loop(0, counts[0], copy_one, pool),)

    # On GPUs, the host waits for every iteration of a loop; other devices copy only the first `counts` blocks.
    return _map_pool(copy_together if current_device()[0] == "gpu" else copy, pool, sources, targets, counts)


def take_row(pool: KVCache, blocks: Int32[Array, "DM"]) -> KVCache:
    """Returns a copy of a row's M blocks on its device; for all other devices, `blocks` must be -1."""
    mesh, axes = jax.sharding.get_abstract_mesh(), LOGICAL_AXIS_RULES[cache_dims(pool[0].keys)[0]]

    def take(pool: Array, blocks: Array) -> tuple[Array]:
        row = _select_rows(blocks >= 0, pool[jnp.maximum(blocks, 0)], 0)
        # The other devices add zeros.
        return (row if mesh.empty or mesh.size == 1 else jax.lax.psum(row, axes),)

    def take_from(array: Array) -> Array:
        dims = cache_dims(array)
        return shard_map_by_dims(take, in_dims=(dims, dims[:1]), out_dims=(("tokens", *dims[1:]),))(array, blocks)[0]

    return jax.tree.map(take_from, pool)


def put_row(pool: KVCache, row: KVCache, blocks: Int32[Array, "DM"]) -> KVCache:
    """Writes a row's M blocks to its device; for all other devices, `blocks` must be beyond the pool."""

    def put(pool: Array, row: Array, blocks: Array) -> tuple[Array]:
        return (pool.at[blocks].set(row, mode="drop"),)

    def put_into(array: Array, row: Array) -> Array:
        dims = cache_dims(array)
        run = shard_map_by_dims(put, in_dims=(dims, ("tokens", *dims[1:]), dims[:1]), out_dims=(dims,))
        return run(array, row, blocks)[0]

    return jax.tree.map(put_into, pool, row)


def _select_rows(mask: Bool[Array, "n"], x: Array | int, y: Array | int) -> Array:
    """Returns the rows of `x` where the mask is True, and of `y` elsewhere."""
    rank = max(jnp.ndim(x), jnp.ndim(y))
    return jnp.where(mask.reshape(-1, *[1] * (rank - 1)), x, y)


def _map_pool(function: Callable[..., tuple[Array]], pool: KVCache, *others: Array | KVCache) -> KVCache:
    """Applies `function` to each array of a pool on each device.

    Args:
        others: more arguments of `function`: trees with the pool's structure and sharding, or arrays split by device.
    """

    def run(array: Array, *others: Array) -> Array:
        dims = cache_dims(array)
        split = [dims if x.ndim > 2 else (dims[0], "tokens")[: x.ndim] for x in others]
        return shard_map_by_dims(function, in_dims=(dims, *split), out_dims=(dims,))(array, *others)[0]

    trees = [x if isinstance(x, tuple) else jax.tree.map(lambda _, x=x: x, pool) for x in others]
    return jax.tree.map(run, pool, *trees)


ProgramName = tuple[Any, ...]
"""Name of a program: its operation, then its sizes and options, as in `("prefill", rows, length)`."""

ProgramSpec = tuple[Callable[..., Any], tuple, dict[str, Any]]
"""A function, the shapes of its arguments, and options of `jax.jit`."""


@dataclass(eq=False)
class SlotPrograms:
    """Compiles the programs for slots of given shapes, and gives access to them by name."""

    definition: DecoderDefinition
    mesh: Mesh
    shapes: SlotShapes
    _: KW_ONLY
    dtype: jnp.dtype
    num_eos: int
    truncates: bool = field(default=False, init=False)
    """Whether the decode programs support top-k, top-p and min-p."""
    num_shards: int = field(init=False)
    """Number of parts into which the mesh splits the rows."""
    block_size: int = field(init=False)
    """Number of tokens per block."""
    num_blocks: int = field(init=False)
    """Number of blocks on each device, including block 0, which belongs to no row."""
    _compiled: dict[ProgramName, Callable[..., Any]] = field(default_factory=dict, init=False)
    _compiled_for: set[tuple[bool, bool, bool]] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        arch, shapes = self.definition.architecture, self.shapes
        self.num_shards = num_cache_shards(self.mesh, arch.num_kv_heads)
        with jax.set_mesh(self.mesh):
            self.block_size = shapes.block_size or cache_block_size(
                arch, shapes.max_length, self.dtype, is_large=shapes.has_large_blocks
            )
        self.num_blocks = self._blocks_for_rows(shapes.num_slots // self.num_shards)
        if shapes.num_blocks is not None:
            self.num_blocks = min(self.num_blocks, shapes.num_blocks)
        least = self._blocks_for_rows(1)
        if shapes.num_blocks and shapes.num_blocks < least:
            raise InputError(
                f"rollout.kv_blocks: {shapes.num_blocks} blocks of {self.block_size} tokens on each device are too few "
                f"for 2 reserved blocks and one row of {shapes.max_row_length} tokens; set it to at least {least} or "
                "to null, or lower rollout.max_new_tokens or rollout.workers.fast.max_length"
            )

    @property
    def blocks_per_row(self) -> int:
        """Number of blocks of the longest row in these slots."""
        return self.blocks_for(self.shapes.max_row_length)

    @property
    def blocks_per_sample(self) -> int:
        """Number of blocks of the longest sample; the cache of a suspended row is padded to this size."""
        return self.blocks_for(self.shapes.max_length)

    @property
    def table_width(self) -> int:
        """Number of columns of the block table; with `rows_together`, equal on all engines, which then round alike."""
        return self.blocks_per_row if self.shapes.rows_together is None else self.blocks_per_sample

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of blocks needed for this many tokens."""
        return -(-num_tokens // self.block_size)

    def blocks_for_row(self, num_tokens: int) -> int:
        """Returns the number of blocks needed for `num_tokens` tokens, at most `blocks_per_row`."""
        return min(self.blocks_for(num_tokens), self.blocks_per_row)

    def _blocks_for_rows(self, num_rows: int) -> int:
        """Returns the blocks needed for `num_rows` rows of full length, plus block 0 and the last block of a prompt."""
        return num_rows * self.blocks_per_row + 2

    @property
    def num_route_words(self) -> int:
        """Number of 32-bit words for a token's routes (its experts); 0 if they are not recorded."""
        shape = self.definition.architecture.route_shape if self.shapes.records_routes else None
        return 0 if shape is None else shape.num_words

    @property
    def preempts(self) -> bool:
        """Whether rows may need more blocks than there are."""
        return self.num_blocks < self._blocks_for_rows(self.shapes.num_slots // self.num_shards)

    @property
    def capacity(self) -> int:
        """Number of tokens that fit into the KV caches of all devices together."""
        of_slots = self.shapes.num_slots * self.blocks_per_row
        if self.preempts:
            of_slots = min(of_slots, self.num_shards * (self.num_blocks - 2))
        return of_slots * self.block_size

    def __getitem__(self, name: ProgramName) -> Callable[..., Any]:
        return self._compiled[name]

    def compile(self, *, suspends: bool, recomputes: bool, truncates: bool) -> None:
        """Compiles the required programs that are not compiled yet.

        Args:
            suspends: whether samples may leave their slots before they are done.
            recomputes: whether prefills may have to recompute lost caches.
            truncates: whether the sampling rules can exclude tokens (top-k, top-p or min-p).
        """
        if (suspends, recomputes, truncates) in self._compiled_for:
            return
        self._compiled_for.add((suspends, recomputes, truncates))
        self.truncates |= truncates
        with jax.set_mesh(self.mesh):
            specs = self.program_specs(suspends=suspends, recomputes=recomputes, truncates=truncates)
            lowered = {name: self._lower(spec) for name, spec in specs.items() if name not in self._compiled}
        self._compiled |= zip(lowered, compile_together(lowered.values()), strict=True)

    def lower_programs(self, *, truncates: bool, recomputes: bool) -> dict[str, Lowered]:
        """Lowers the programs that take the most memory: the longest prefills, and decoding with all slots full.

        Args:
            recomputes: whether to include the prefill that recomputes a lost cache.
        """
        shapes = self.shapes
        specs = {
            "prefill": self._prefill_program(shapes.prefill_rows[-1], shapes.max_prompt_length),
            "decode": self._decode_program(shapes.num_slots, truncates=truncates),
        }
        if recomputes:
            specs["recompute"] = self._prefill_program(1, shapes.used_recompute_buckets[-1])
        return {name: self._lower(spec) for name, spec in specs.items()}

    def with_blocks_for_rows(self, num_rows: int) -> SlotPrograms:
        """Returns new programs with only as many blocks as `num_rows` full rows on each device need."""
        scarce = replace(self, shapes=self.shapes._replace(has_large_blocks=False))
        return replace(scarce, shapes=scarce.shapes._replace(num_blocks=scarce._blocks_for_rows(num_rows)))

    def _lower(self, spec: ProgramSpec) -> Lowered:
        function, arguments, options = spec
        with jax.set_mesh(self.mesh):
            return jax.jit(function, compiler_options=compiler_options(self.mesh), **options).lower(*arguments)

    @property
    def abstract_pool(self) -> KVCache:
        """Shapes and shardings of the blocks of all devices."""
        return abstract_cache(self._cache_shapes(self.num_shards * self.num_blocks), self.mesh)

    @property
    def abstract_row(self) -> KVCache:
        """Shapes and shardings of one sample's blocks, which are replicated over the shards of rows."""
        shapes = self._cache_shapes(self.blocks_per_sample)
        dims = jax.tree.map(lambda x: ("tokens", *cache_dims(x, self.mesh)[1:]), self.abstract_pool)
        return abstract_arrays(shapes, sharding_tree(self.mesh, shapes, dims))

    def _cache_shapes(self, num_blocks: int) -> KVCache:
        is_int8 = self.shapes.kv_cache == "int8"
        # On CPUs, XLA would convert the whole bfloat16 pool to write one token.
        dtype = jnp.float32 if device_platform(self.mesh.devices.flat[0]) == "cpu" else self.dtype
        return cache_shapes(self.definition.architecture, num_blocks, self.block_size, dtype, is_int8=is_int8)

    @functools.cached_property
    def abstract_weights(self) -> DecodeWeights:
        return abstract_decode_weights(self.definition, self.mesh, self.dtype)

    def _replicated(self, *shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, PartitionSpec()))

    def program_specs(self, *, suspends: bool, recomputes: bool, truncates: bool) -> dict[ProgramName, ProgramSpec]:
        """Returns the names and specifications of the programs that `compile` needs for these arguments."""
        shapes, pool, row = self.shapes, self.abstract_pool, self.abstract_row
        per_row = self._replicated(self.num_shards * self.blocks_per_sample)
        most_copies = self._replicated(shapes.num_slots)
        zeros = lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), pool)  # noqa: E731
        copied = pool, most_copies, most_copies, self._replicated(self.num_shards)
        specs: dict[ProgramName, ProgramSpec] = {
            ("open",): (zeros, (), {"out_shardings": tree_shardings(pool)}),
            ("copy",): (copy_blocks, copied, _update_options(pool)),
        }
        for length in shapes.prompt_buckets:
            specs |= {("prefill", rows, length): self._prefill_program(rows, length) for rows in shapes.prefill_rows}
        for rows in shapes.batch_buckets:
            specs["decode", rows, truncates] = self._decode_program(rows, truncates=truncates)
        if suspends:
            specs["take",] = take_row, (pool, per_row), {"out_shardings": tree_shardings(row)}
            specs["put",] = put_row, (pool, row, per_row), _update_options(pool)
        if recomputes:
            lengths = shapes.used_recompute_buckets
            specs |= {("prefill", 1, length): self._prefill_program(1, length) for length in lengths}
        return specs

    def _prefill_program(self, rows: int, length: int) -> ProgramSpec:
        """Returns the prefill program for `rows` rows of up to `length` tokens on each device."""
        pool, rows = self.abstract_pool, rows * self.num_shards
        ids, targets = self._replicated(rows, length), self._replicated(rows, self.blocks_for(length))
        arguments = self.abstract_weights, pool, ids, self._replicated(rows), targets
        options = {"donate_argnums": 1, "out_shardings": (tree_shardings(pool), self._replicated().sharding)}
        return functools.partial(prefill_blocks, self.definition, self.shapes.records_routes), arguments, options

    def _decode_program(self, rows: int, *, truncates: bool) -> ProgramSpec:
        pool, scalar = self.abstract_pool, self._replicated(dtype=jnp.float32)
        rules = SamplingRules(scalar, self._replicated(), scalar, scalar)  # pyright: ignore[reportArgumentType]
        arguments = (
            *(self.abstract_weights, pool, self._replicated(len(RowTable._fields), rows)),
            *(self._replicated(rows, self.table_width), self._replicated(self.shapes.max_forced, rows)),
            self._replicated(len(SegmentLimits._fields)),
            *(rules, self._replicated(), self._replicated(self.num_eos)),
        )
        whole = self._replicated().sharding
        options = {"donate_argnums": 1, "out_shardings": (tree_shardings(pool), whole, whole)}
        sampler: Sampler = sample_tokens_truncated if truncates else sample_tokens
        groups = None
        if self.shapes.rows_together not in (None, rows):
            groups = RowGroups(rows // self.shapes.rows_together, self.num_shards)
        decoder = SegmentDecoder(self.definition, sampler, self.shapes.segment_max, groups, self.num_route_words)
        return decoder.decode_segment, arguments, options


def compile_together(programs: Collection[Lowered]) -> list[Compiled]:
    """Compiles programs in parallel threads, and returns them in order; XLA releases the GIL."""
    with ThreadPoolExecutor(min(MAX_COMPILING, os.cpu_count() or 1)) as pool:
        return list(pool.map(Lowered.compile, programs))


def _update_options(pool: KVCache) -> dict[str, Any]:
    """Returns the `jax.jit` options of a program that updates the pool, its first argument, in place."""
    return {"donate_argnums": 0, "out_shardings": tree_shardings(pool)}
