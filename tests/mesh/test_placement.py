from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from app.distributed.collectives import gather_over_hosts, max_over_hosts, sum_over_hosts
from app.mesh.placement import (
    check_rows_per_host,
    num_local_row_shards,
    num_row_shards,
    supports_host_memory,
    to_device_memory,
    to_global,
    to_host_memory,
    to_local,
)
from tests.tiny import make_mesh

SHAPES = [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2), (1, 1, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("row_dim", [0, 1])
def test_rows_come_back_as_they_went(shape, row_dim):
    mesh = make_mesh(shape)
    rows = np.arange(8 * 16 * 3).reshape((16, 8, 3) if row_dim == 0 else (8, 16, 3))
    tree = to_global(mesh, {"rows": rows}, row_dim=row_dim)
    np.testing.assert_array_equal(to_local(tree["rows"], row_dim=row_dim), rows)
    part = tree["rows"].sharding.shard_shape(rows.shape)
    assert part[row_dim] == 16 // num_row_shards(mesh)


@pytest.mark.parametrize("shape", SHAPES)
def test_one_host_holds_every_row(shape):
    mesh = make_mesh(shape)
    assert num_local_row_shards(mesh) == num_row_shards(mesh) == shape[0] * shape[1]
    check_rows_per_host(mesh)


def test_one_host_agrees_with_itself():
    values = np.array([1.0 + 2**-50, 3.0])
    np.testing.assert_array_equal(gather_over_hosts(values), values[None])
    np.testing.assert_array_equal(sum_over_hosts(values), values)
    np.testing.assert_array_equal(max_over_hosts(values), values)


def test_arrays_wait_in_host_memory_and_come_back_as_they_were():
    mesh = make_mesh((2, 2, 2))
    tree = {"x": to_global(mesh, np.arange(32.0).reshape(8, 4)), "y": jnp.float32(3)}
    assert supports_host_memory(mesh)
    waiting = to_host_memory(tree)
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(waiting)} == {"pinned_host"}
    back = to_device_memory(waiting)
    assert jax.tree.map(lambda x: x.sharding, back) == jax.tree.map(lambda x: x.sharding, tree)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
