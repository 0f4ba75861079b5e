from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from app.mesh.axis_rules import axis_size, constrain, partition_spec, sharding_tree
from app.model.decoder import DecoderDefinition
from tests.tiny import EVEN, ODD, make_mesh


def test_sizes_of_axes_multiply():
    mesh = make_mesh((2, 2, 2))
    assert [axis_size(mesh, axes) for axes in (None, "tp", ("dp", "fsdp"))] == [1, 2, 4]


def test_dims_go_to_their_axes():
    mesh = make_mesh((1, 4, 2))
    assert partition_spec(("layers", "embed", "mlp"), (2, 32, 48), mesh) == PartitionSpec(None, "fsdp", "tp")
    assert partition_spec(("rows", "tokens"), (8, 3), mesh) == PartitionSpec(("dp", "fsdp"), None)


def test_a_dim_that_its_axis_does_not_divide_is_replicated():
    mesh = make_mesh((1, 4, 2))
    for shape, axes in (((53, 36), (None, "fsdp")), ((53, 30), (None, None)), ((64, 32), ("tp", "fsdp"))):
        assert partition_spec(("vocab", "embed"), shape, mesh) == PartitionSpec(*axes)


def test_an_unknown_dim_is_an_error():
    with pytest.raises(KeyError, match="hidden"):
        partition_spec(("hidden",), (8,), make_mesh())


def test_a_missing_dim_is_an_error():
    with pytest.raises(AssertionError, match="does not name the dims"):
        partition_spec(("embed",), (8, 8), make_mesh())


@pytest.mark.parametrize("architecture", [ODD, EVEN])
@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2)])
def test_every_weight_of_a_decoder_has_a_sharding_that_fits_it(architecture, shape):
    definition, mesh = DecoderDefinition.create(architecture), make_mesh(shape)
    shardings = sharding_tree(mesh, definition.shapes, definition.dims)
    assert jax.tree.structure(shardings) == jax.tree.structure(definition.shapes)
    # shard_shape raises where a dim does not divide.
    parts = jax.tree.map(lambda sharding, leaf: sharding.shard_shape(leaf.shape), shardings, definition.shapes)
    split = parts["embedding"] != definition.shapes["embedding"].shape
    assert split == (mesh.size > 1 and (architecture is EVEN or shape != (1, 8, 1)))


def test_constrain_splits_on_the_mesh_in_force_and_does_nothing_without_one():
    mesh = make_mesh((2, 2, 2))
    x = jnp.zeros((8, 6))
    assert constrain(x, "rows", "vocab") is x
    with jax.set_mesh(mesh):
        split = jax.jit(lambda x: constrain(x, "rows", "vocab"))(x)
    assert split.sharding.shard_shape(x.shape) == (2, 3)
