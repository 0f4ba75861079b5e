"""Tests of the bytes that compiled programs communicate, against hand-computed values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from scripts.bench.hlo_collectives import (
    Collective,
    parse_collectives,
    parse_groups,
    program_collectives,
    total_traffic,
)
from tests.tiny import make_mesh

ONE_HOST, TWO_HOSTS = [0] * 8, [0, 0, 0, 0, 1, 1, 1, 1]
ALL = (tuple(range(8)),)


def compiled(
    function: Callable[..., Any], *, shape: tuple[int, int, int], size: int, spec: P, out: P
) -> list[Collective]:
    """Returns the collectives of `function` on each device's part of a float32 array of `size` numbers."""
    mesh = make_mesh(shape)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    x = jax.ShapeDtypeStruct((size,), jnp.float32, sharding=NamedSharding(mesh, spec))
    return program_collectives(jax.jit(mapped).lower(x).compile())


def test_gathering_shards_of_eight_devices_sends_all_but_ones_own_part():
    (found,) = compiled(
        lambda x: jax.lax.all_gather(x, "fsdp", tiled=True), shape=(1, 8, 1), size=64, spec=P("fsdp"), out=P()
    )
    assert (found.kind, found.dtype, found.operand_bytes, found.groups, found.loop_trip_counts) == (
        "all-gather",
        "f32",
        32,
        ALL,
        (),
    )
    assert found.bytes_per_device == 7 * 32
    # A ring of eight devices crosses from host to host once in each direction.
    assert found.bytes_leaving_host(TWO_HOSTS) == 7 * 32
    assert found.bytes_leaving_host(ONE_HOST) == 0


def test_a_sum_over_pairs_is_sent_once_there_and_once_back():
    (found,) = compiled(lambda x: jax.lax.psum(x, "tp"), shape=(2, 2, 2), size=64, spec=P("tp"), out=P())
    assert found.groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    assert found.bytes_per_device == 2 * 1 / 2 * 128
    assert found.bytes_leaving_host(TWO_HOSTS) == 0
    # Were the two of every pair on different hosts, each would send its own.
    assert found.bytes_leaving_host([0, 1] * 4) == 4 * 128


def test_other_kinds_are_counted_by_what_a_device_sends():
    def everything(x: jax.Array) -> tuple[jax.Array, ...]:
        scattered = jax.lax.psum_scatter(x, "dp", tiled=True)
        exchanged = jax.lax.all_to_all(x, "dp", 0, 0, tiled=True)
        passed_on = jax.lax.ppermute(x, "dp", [(i, (i + 1) % 4) for i in range(4)])
        return scattered, exchanged, passed_on

    collectives = compiled(everything, shape=(4, 1, 2), size=64, spec=P("dp"), out=P("dp"))
    found = {one.kind: one for one in collectives}
    assert {kind: one.bytes_per_device for kind, one in found.items()} == {
        "reduce-scatter": 3 / 4 * 64,
        "all-to-all": 3 / 4 * 64,
        "collective-permute": 64,
    }
    assert found["all-to-all"].groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    # Each of the four devices of a host sends half of its array to the other one; two of them pass theirs on to it.
    assert found["all-to-all"].bytes_leaving_host(TWO_HOSTS) == 4 * 32
    assert found["collective-permute"].bytes_leaving_host(TWO_HOSTS) == 2 * 64
    assert found["reduce-scatter"].bytes_leaving_host(TWO_HOSTS) == 2 * 48


def test_a_closed_loop_counts_as_often_as_it_goes_round_and_an_open_one_once():
    def looped(x: jax.Array) -> jax.Array:
        def turn(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(jax.lax.psum(x, "dp")), None

        closed = jax.lax.scan(turn, x, None, length=5)[0]
        return jax.lax.while_loop(lambda x: jnp.all(x < 1e3), lambda x: 2 * jax.lax.psum(x, "dp"), closed)

    found = compiled(looped, shape=(8, 1, 1), size=64, spec=P("dp"), out=P("dp"))
    once = 2 * 7 / 8 * 32
    assert sorted(
        (one.loop_trip_counts, one.bytes_per_device)
        for one in found
        if one.dtype == "f32" and not one.is_in_dynamic_loop
    ) == [((5,), 5 * once)]
    in_open = [one for one in found if one.is_in_dynamic_loop]
    assert [(one.loop_trip_counts, one.bytes_per_device) for one in in_open] == [((None,), once)]
    whole = total_traffic(found, TWO_HOSTS)
    assert (whole.count, whole.bytes_per_device, whole.by_kind) == (6, 6 * once, {"all-reduce": 6 * once})
    assert whole.bytes_leaving_host == 6 * once


ASYNC = """\
HloModule two, is_scheduled=true, num_partitions=4

%wrapped (p: bf16[8,16]) -> bf16[2,16] {
  %p = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %reduce-scatter.1 = bf16[2,16]{1,0:T(8,128)(2,1)} reduce-scatter(%p), replica_groups=[1,4]<=[4], dimensions={0}
}

ENTRY %main (x: bf16[8,16], y: s32[3]) -> bf16[2,16] {
  %x = bf16[8,16]{1,0:T(8,128)(2,1)} parameter(0)
  %y = s32[3]{0} parameter(1)
  %gather = ((bf16[8,16], s32[3]), (bf16[16,16], s32[6])) all-gather-start(%x, %y), replica_groups={{0,1},{2,3}}
  %gathered = (bf16[16,16]{1,0}, s32[6]{0}) all-gather-done(%gather)
  %sum = f32[] all-reduce-start(%gathered), replica_groups={}, to_apply=%add
  %start = ((bf16[8,16]{1,0}), bf16[2,16]{1,0}, u32[]) async-start(%x), calls=%wrapped
  ROOT %done = bf16[2,16]{1,0} async-done(%start), calls=%wrapped
}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}
"""


def test_asynchronous_and_merged_collectives_are_counted_once():
    gather, total, scatter = parse_collectives(ASYNC)
    assert (gather.kind, gather.operand_bytes, gather.groups) == ("all-gather", 256 + 12, ((0, 1), (2, 3)))
    assert (total.kind, total.operand_bytes, total.groups) == ("all-reduce", 512 + 24, ((0, 1, 2, 3),))
    assert (scatter.kind, scatter.bytes_per_device) == ("reduce-scatter", 3 / 4 * 256)


def test_what_is_not_counted_is_refused():
    with pytest.raises(ValueError, match="send"):
        parse_collectives(ASYNC.replace("all-gather-start", "send"))


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("{{0,2},{1,3}}, dimensions={0}", ((0, 2), (1, 3))),
        ("{}, to_apply=%add", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("[4,2]<=[8], dimensions={0}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("[4,2]<=[2,4]T(1,0), dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'x'}, dimensions={0}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['x'=2,'y'=4] {'x','y'}", ((0, 1, 2, 3, 4, 5, 6, 7),)),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}, channel_id=1", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['x'=2,'y'=4] {'y':(2)2}", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("mesh['x'=2,'y'=4] {'y':(1)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_groups_are_read_in_every_notation(text: str, groups: tuple[tuple[int, ...], ...]):
    assert parse_groups(text, 8) == groups


def test_a_notation_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="not known"):
        parse_groups("<everybody>", 8)
