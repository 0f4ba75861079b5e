"""Grouped matmuls: each group of rows has its own matrix, as in a mixture of experts.

The work is proportional to rows, not to rows x groups. On TPUs, XLA has a kernel for the matmul, but expands the
gradient of the matrices to all rows of all groups, so we use megablox's kernel for the gradient. On CPUs and GPUs, XLA
expands both: we use our own kernels on GPUs, and loops over blocks of rows on CPUs and on GPUs without these kernels.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from app.mesh.axis_rules import current_device
from app.model.kernels.triton_backend import has_triton

MAX_BLOCK = 256
"""Maximum number of rows that a CPU multiplies at once."""
TILE_ROWS, MAX_TILE_BYTES = 512, 2048
"""Rows, and maximum bytes per row, of a tile in the TPU's gradient kernel, so that tiles fit in a v5e's VMEM."""


@jax.custom_vjp
def grouped_product(
    x: Float[Array, "M I"], matrices: Float[Array, "E I O"], sizes: Int32[Array, "E"]
) -> Float[Array, "M O"]:
    """Multiplies each row by the matrix of its group: y[m] = x[m] matrices[group of m].

    Rows are sorted by group. Results and gradients of rows after the last group are undefined; these rows do not affect
    others, whatever their values. The matmul rounds equally with and without gradients, so that scoring and updates
    compute equal logprobs.

    Args:
        sizes: number of rows of each group; a group may have none.
    """
    return _product(x, matrices, sizes, contracted=1)


def _backward(saved: tuple[Array, Array, Array], dy: Array) -> tuple[Array, Array, None]:
    x, matrices, sizes = saved
    match current_device()[0]:
        case "tpu":
            of_matrices = tgmm_product(x, dy, sizes)
        case "gpu" if has_triton():
            # Pallas is slow to import and not needed on a CPU.
            from app.model.kernels.gpu_grouped_product import matrix_gradient

            of_matrices = matrix_gradient(x, dy, sizes)
        case _:
            of_matrices = blockwise_matrix_gradient(x, dy, sizes)
    return _product(dy, matrices, sizes, contracted=2), of_matrices.astype(matrices.dtype), None


grouped_product.defvjp(lambda *inputs: (grouped_product(*inputs), inputs), _backward)


def _product(x: Array, matrices: Array, sizes: Array, *, contracted: int) -> Array:
    match current_device()[0]:
        case "tpu":
            return _ragged_product(x, matrices, sizes, contracted)
        case "gpu" if has_triton():
            from app.model.kernels.gpu_grouped_product import rows_product

            return rows_product(x, matrices, sizes, contracted=contracted)
        case _:
            return _blockwise_product(x, matrices, sizes, contracted)


def _ragged_product(x: Array, matrices: Array, sizes: Array, contracted: int) -> Array:
    dims = jax.lax.RaggedDotDimensionNumbers((((1,), (contracted,)), ((), ())), [0], [0])
    return jax.lax.ragged_dot_general(x, matrices, sizes, dims)


def tgmm_product(x: Float[Array, "M I"], dy: Float[Array, "M O"], sizes: Int32[Array, "E"]) -> Float[Array, "E I O"]:
    """Returns x^T dy of each group's rows, by JAX's megablox kernel. Source: Gale et al. 2022, "MegaBlocks"."""
    from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

    x, dy = (jnp.pad(rows, ((0, -len(rows) % TILE_ROWS), (0, 0))) for rows in (x, dy))
    tiling = TILE_ROWS, *(min(rows.shape[1], MAX_TILE_BYTES // rows.itemsize) for rows in (x, dy))
    return tgmm(x.T, dy, sizes, preferred_element_type=x.dtype, tiling=tiling)


def _blockwise_product(x: Array, matrices: Array, sizes: Array, contracted: int) -> Array:
    """Computes `grouped_product` with a scan over groups, and in each group a loop over blocks of rows.

    A group's last block may include rows of later groups; their results are overwritten later.
    """
    block = _block_size(x, sizes)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def add_group(y: Array, group: tuple[Array, Array, Array]) -> tuple[Array, None]:
        matrix, first, size = group

        def add_block(i: Array, y: Array) -> Array:
            rows = jax.lax.dynamic_slice_in_dim(padded, first + i * block, block)
            product = jax.lax.dot_general(rows, matrix, (((1,), (contracted - 1,)), ((), ())))
            return jax.lax.dynamic_update_slice_in_dim(y, product, first + i * block, 0)

        return jax.lax.fori_loop(0, -(-size // block), add_block, y), None

    empty = jnp.zeros((len(padded), matrices.shape[3 - contracted]), x.dtype)
    y, _ = jax.lax.scan(add_group, empty, (matrices, jnp.cumsum(sizes) - sizes, sizes))
    return y[: len(x)]


def blockwise_matrix_gradient(
    x: Float[Array, "M I"], dy: Float[Array, "M O"], sizes: Int32[Array, "E"]
) -> Float[Array, "E I O"]:
    """Returns x^T dy of each group's rows, summed in float32 block by block."""
    block = _block_size(x, sizes)
    padded = [jnp.pad(rows, ((0, block), (0, 0))) for rows in (x, dy)]

    def of_group(_: None, group: tuple[Array, Array]) -> tuple[None, Array]:
        first, size = group

        def add_block(i: Array, total: Array) -> Array:
            is_own = (jnp.arange(block) < size - i * block)[:, None]
            blocks = (jax.lax.dynamic_slice_in_dim(rows, first + i * block, block) for rows in padded)
            a, b = (jnp.where(is_own, rows, 0) for rows in blocks)
            return total + jax.lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)

        zeros = jnp.zeros((x.shape[1], dy.shape[1]), jnp.float32)
        return None, jax.lax.fori_loop(0, -(-size // block), add_block, zeros).astype(x.dtype)

    return jax.lax.scan(of_group, None, (jnp.cumsum(sizes) - sizes, sizes))[1]


def _block_size(x: Array, sizes: Array) -> int:
    """Returns the rows per block: the power of two above the mean group size, at most `MAX_BLOCK`."""
    return min(MAX_BLOCK, 1 << max(len(x) // len(sizes), 1).bit_length())
