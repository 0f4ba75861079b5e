"""Tests the text of compiled programs: what their collectives send, against hand-computed bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from app.preflight.hlo_text import Collective, HloProgram
from scripts.bench.hlo_collectives import program_collectives
from settings import InputError
from tests.tiny import make_mesh


def test_collectives_are_counted_by_the_bytes_that_a_device_sends():
    def everything(x: jax.Array) -> tuple[jax.Array, ...]:
        scattered = jax.lax.psum_scatter(x, "dp", tiled=True)
        exchanged = jax.lax.all_to_all(x, "dp", 0, 0, tiled=True)
        passed_on = jax.lax.ppermute(x, "dp", [(i, (i + 1) % 4) for i in range(4)])
        return scattered, exchanged, passed_on

    mesh, split = make_mesh((4, 1, 2)), P("dp")
    mapped = jax.shard_map(everything, mesh=mesh, in_specs=split, out_specs=split, check_vma=False)
    x = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=NamedSharding(mesh, split))
    found = program_collectives(jax.jit(mapped).lower(x).compile())
    assert {one.collective.kind: one.bytes_per_device for one in found} == {
        "reduce-scatter": 3 / 4 * 64,
        "all-to-all": 3 / 4 * 64,
        "collective-permute": 64,
    }


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
  %start = ((bf16[8,16]{1,0}), bf16[2,16]{1,0}, u32[]) async-start(%x), calls=%wrapped
  ROOT %done = bf16[2,16]{1,0} async-done(%start), calls=%wrapped
}
"""


def test_asynchronous_and_merged_collectives_are_counted_once():
    program = HloProgram(ASYNC)
    found = [one for one in map(program.collective, program.computations[program.entry]) if one is not None]
    assert found == [Collective("all-gather", 256 + 12), Collective("reduce-scatter", 3 * 64)]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("[4,2]<=[2,4]T(1,0), dimensions={0}", 2),
        ("mesh['x'=2,'y'=4] {'y'}, dimensions={0}", 4),
        ("mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}, channel_id=1", 4),
        ("mesh['x'=2,'y'=8] {'y':(2)4}", 4),
    ],
)
def test_replica_groups_are_read_in_every_known_notation(text: str, size: int):
    program = HloProgram(ASYNC.replace("{{0,1},{2,3}}", text))
    gather = next(one for one in program.computations["main"] if one.name == "gather")
    assert gather.group_size == size
    with pytest.raises(ValueError, match="unknown notation"):
        _ = HloProgram(ASYNC.replace("{{0,1},{2,3}}", "<everybody>")).computations["main"][2].group_size


BODIES = """\
HloModule loops, is_scheduled=true, num_partitions=8

%body (s: (s32[], f32[64])) -> (s32[], f32[64]) {
  %s = (s32[], f32[64]) parameter(0)
  %r = f32[64]{0} all-reduce(%s), replica_groups=[1,8]<=[8]
}

%condition (s: (s32[], f32[64])) -> pred[] {
  %n = s32[]{:T(128)} constant(5)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%open (s: (s32[], f32[64])) -> pred[] {
  %i2 = s32[] get-tuple-element(%t2), index=0
  %n2 = s32[] get-tuple-element(%t2), index=1
  ROOT %lt2 = pred[] compare(%i2, %n2), direction=LT
}

%scattered (x: f32[64]) -> f32[8] {
  %all = f32[64]{0} all-reduce(%x), replica_groups=[1,8]<=[8]
  ROOT %part = f32[8]{0} dynamic-slice(%all)
}

"""
CLOSED = "%l = (s32[], f32[64]) while(%p), condition=%condition, body=%body"
OPEN = '%o = (s32[], f32[64]) while(%p), condition=%open, body=%body, metadata={op_name="jit(f)/jvp(lm_head)/while"}'
A_SUM = 2 * 7 * 64 * 4 // 8
"""Bytes of an all-reduce of 64 numbers over 8 devices."""


def program_of(*lines: str) -> HloProgram:
    return HloProgram(f"{BODIES}ENTRY %main (p: f32[64]) -> f32[64] {{\n" + "".join(f"  {x}\n" for x in lines) + "}\n")


def test_collective_bytes_in_a_loop_count_once_per_iteration() -> None:
    assert program_of(CLOSED).sent_bytes({}) == {"all-reduce": 5 * A_SUM}
    known = CLOSED + ', backend_config={"known_trip_count":{"n":"7"}}'
    assert program_of(known).sent_bytes({}) == {"all-reduce": 7 * A_SUM}
    assert program_of(CLOSED, OPEN).sent_bytes({"lm_head": 3}) == {"all-reduce": 8 * A_SUM}
    assert program_of(CLOSED, OPEN).sent_bytes({}, turn_of="jvp(lm_head)") == {"all-reduce": A_SUM}
    with pytest.raises(InputError, match=r"the loop o \(jit\(f\)/jvp\(lm_head\)/while\)"):
        program_of(OPEN).sent_bytes({})


def test_collective_bytes_are_read_from_start_instructions_and_fusions() -> None:
    start = "%s = (f32[8]{0}, f32[64]{0}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={0}"
    fusion = "%f = f32[8]{0} fusion(%p), kind=kCustom, calls=%scattered"
    done = "%d = f32[64]{0} all-gather-done(%s)"
    assert program_of(start, fusion, done).sent_bytes({}) == {"all-gather": 7 * 32, "reduce-scatter": 7 * 32}
