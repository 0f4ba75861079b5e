"""Attention over packed rows: dense, in blocks by XLA, or by the platform's kernel."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from app.mesh.axis_rules import current_device
from app.mesh.chips import kernel_bytes, padded_head_dim
from app.model.architecture import Architecture
from app.model.attention.blockwise import block_attention
from app.model.attention.dense import ATTENTION_SCOPE, DEFAULT_SCORE_MOD, ScoreMod, dot_product_attention
from app.model.attention.pairs import UNREACHABLE, Blocking, BlockPairs, PackedInputs, block_pairs
from app.model.kernels.triton_backend import has_triton
from app.model.segment_layout import SegmentLayout, Window, attention_mask
from settings.errors import InputError
from settings.schema.model import AttentionImplementation

BLOCKING_BY_PLATFORM = {"cpu": Blocking(64, pairs_per_iteration=1), "tpu": Blocking(512, pairs_per_iteration=1)}
"""Blocking per platform: on a CPU, one pair of small blocks fits in the cache; one pair of large blocks fills a TPU."""
PARALLEL_BLOCKING = Blocking(block_size=128, pairs_per_iteration=128)
KERNEL_BLOCK_SIZES = (128, 256, 512)
"""Block sizes of the TPU kernels; the largest that fits is fastest."""
MAX_BLOCKS_PER_ROW = 256
"""Maximum number of blocks per row: the pairs of several rows must fit in the TPU's scalar memory."""
GPU_BLOCK_SIZE = 64
"""Block size of the GPU kernels, small enough for their accumulators to fit in registers."""


def platform_blocking(
    num_tokens: int,
    head_dim: int,
    dtype: DTypeLike,
    implementation: AttentionImplementation = "auto",
    *,
    group_size: int,
) -> Blocking:
    """Returns how the current mesh's devices compute attention over rows of this many tokens.

    Args:
        dtype: dtype of queries, keys and values.
        implementation: value of `model.attention`: `auto`, `kernel` or `xla`.
        group_size: query heads per key head.

    Raises:
        InputError: `implementation` is `kernel`, but no kernel supports these devices and rows.
    """
    platform, kind = current_device()
    kernel = None
    if platform == "tpu" and implementation != "xla":
        kernel = _tpu_kernel_blocking(kind, num_tokens, head_dim, group_size, jnp.dtype(dtype).itemsize)
    # Triton multiplies float32 arrays in registers, which are too small for blocks of them, and not on tensor cores.
    if platform == "gpu" and implementation != "xla" and jnp.dtype(dtype) != jnp.float32 and has_triton():
        kernel = Blocking(GPU_BLOCK_SIZE, 1, kernel="gpu")
    if kernel is None and implementation == "kernel":
        raise InputError(
            f"model.attention: kernel, but there is no attention kernel for {platform} devices ({kind}) and rows of "
            f"{num_tokens:,} tokens with {group_size} query heads of size {head_dim} per key head in "
            f"{jnp.dtype(dtype)}. The TPU kernel needs rows that fit in on-chip memory; the GPU "
            "kernel needs bfloat16, and a JAX version with Pallas' Triton backend. Set model.attention to auto"
        )
    return kernel or BLOCKING_BY_PLATFORM.get(platform, PARALLEL_BLOCKING)


def _tpu_kernel_blocking(kind: str, num_tokens: int, head_dim: int, group_size: int, itemsize: int) -> Blocking | None:
    """Returns the largest blocks with which the backward kernel fits in on-chip memory; None if none fit.

    On-chip memory contains a row's float32 gradients for one key head; double-buffered queries with their two gradients
    and accumulators; double-buffered keys and values with float32 products; and scores. The numbers of products and
    scores are taken from the compiler's reports for blocks that do not fit.
    """
    available, width = kernel_bytes(kind), padded_head_dim(head_dim)
    sizes = [size for size in KERNEL_BLOCK_SIZES if size < 2 * num_tokens] or KERNEL_BLOCK_SIZES[:1]
    for size in reversed(sizes):
        num_blocks = -(-num_tokens // size)
        row, scores = 2 * 4 * num_blocks * size * width, 10 * itemsize * size**2
        queries, keys = group_size * size * width * (6 * itemsize + 4), size * width * (16 * itemsize)
        if row + queries + keys + scores <= available and num_blocks <= MAX_BLOCKS_PER_ROW:
            return Blocking(size, 1, kernel="tpu")
    return None


def architecture_blocking(architecture: Architecture, num_tokens: int, dtype: DTypeLike) -> Blocking:
    """Returns how the layers compute attention over rows of this many tokens; see `platform_blocking`."""
    a = architecture
    group_size = a.num_query_heads // a.num_kv_heads
    return platform_blocking(num_tokens, a.head_dim, dtype, a.attention_implementation, group_size=group_size)


@jax.named_scope(ATTENTION_SCOPE)
def make_block_pairs(layout: SegmentLayout, windows: Collection[Window], blocking: Blocking) -> BlockPairs | None:
    """Returns the block pairs that `packed_attention` needs for these rows, shared by layers with any of these windows.

    Without a kernel, rows of a single block need no pairs; the result is then None.
    """
    size = blocking.block_size
    if layout.segment_ids.shape[1] <= size and not blocking.kernel:
        return None
    layout = SegmentLayout(*(_pad_to_blocks(jnp.asarray(x), size, axis=1) for x in layout))
    return block_pairs(layout, windows, size, with_padding=blocking.kernel is not None)


@jax.named_scope(ATTENTION_SCOPE)
def packed_attention(
    query: Float[Array, "R T Q H"],
    keys: Float[Array, "R K T H"],
    values: Float[Array, "R K T H"],
    layout: SegmentLayout,
    *,
    window: Window = None,
    score_mod: ScoreMod = DEFAULT_SCORE_MOD,
    pairs: BlockPairs | None = None,
    blocking: Blocking | None = None,
) -> Float[Array, "R T Q H"]:
    """Returns causal attention inside each sample of packed rows. The result is finite but undefined on padding.

    Args:
        blocking: the result of `platform_blocking` for these rows; computed here if None.
        pairs: the result of `make_block_pairs` for these rows and `window`; computed here if None.
    """
    num_tokens = query.shape[1]
    if blocking is None:
        group_size = query.shape[2] // keys.shape[1]
        blocking = platform_blocking(num_tokens, query.shape[-1], query.dtype, group_size=group_size)
    size = blocking.block_size
    if num_tokens <= size and not blocking.kernel:
        return dot_product_attention(query, keys, values, attention_mask(layout, layout, 0, window), score_mod)
    pairs = pairs or make_block_pairs(layout, [window], blocking)
    assert pairs is not None
    inputs = PackedInputs(
        _pad_to_blocks(query, size, axis=1),
        _pad_to_blocks(keys, size, axis=2),
        _pad_to_blocks(values, size, axis=2),
        SegmentLayout(*(_pad_to_blocks(x, size, axis=1) for x in layout)),
        pairs,
        jnp.asarray(UNREACHABLE if window is None else window, jnp.int32),
    )
    # JAX declares no return type for custom_vjp functions.
    mixed: Any = block_attention(inputs, score_mod, blocking)
    return mixed[:, :num_tokens]


def _pad_to_blocks(x: Array, size: int, *, axis: int) -> Array:
    """Pads an array's token dim at the end to a multiple of `size`."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % size)
    return jnp.pad(x, widths)
