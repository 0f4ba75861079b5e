"""Tests that arrays are sent to process 0 whole, in pieces of bounded size."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from app.checkpoint import array_pieces
from app.checkpoint.array_pieces import gather_in_pieces, piece_program
from tests.tiny import make_mesh

LIMIT = 1000


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        # One row along the first dim is smaller than a piece, or larger.
        ((7, 4, 6), (None, "fsdp", "tp")),
        ((3, 24, 30), (None, ("fsdp", "tp"))),
        # The dim that is cut is itself split.
        ((200, 5), (("fsdp", "tp"),)),
        ((40, 12, 10), ("fsdp", None, "tp")),
        ((4096,), ("tp",)),
    ],
)
def test_an_array_is_gathered_whole_in_pieces_of_bounded_size(monkeypatch, shape, spec, dtype, memory) -> None:
    monkeypatch.setattr(array_pieces, "MAX_PIECE_BYTES", LIMIT)
    sharding = NamedSharding(make_mesh((1, 4, 2)), PartitionSpec(*spec), memory_kind=memory)
    expected = np.random.default_rng(0).normal(size=shape).astype(dtype)
    x = jax.device_put(expected, sharding)
    whole = np.full(shape, np.nan, dtype)
    gather_in_pieces(x, whole)
    np.testing.assert_array_equal(whole, expected)
    gather_in_pieces(x, None)
    (piece,) = jax.tree.leaves(piece_program(x).out_info)
    assert min(LIMIT / 2, x.nbytes) <= math.prod(piece.shape) * x.dtype.itemsize <= LIMIT
    # On CPUs, XLA sends bfloat16 as float32.
    used = piece_program(x).memory_analysis()
    assert used is not None and used.output_size_in_bytes + used.temp_size_in_bytes <= 4 * LIMIT
