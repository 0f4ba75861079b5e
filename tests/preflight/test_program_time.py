"""Tests of the time of compiled programs, on programs written by hand: seconds are counted, nothing is timed."""

from __future__ import annotations

import pytest

from app.mesh.chips import TPU_CHIPS
from app.preflight.program_time import ProgramTime, program_time
from settings.errors import InputError

CHIP = TPU_CHIPS["v5e"]
MEGABYTE = "f32[262144]{0:T(1024)}"
MEBIBYTE_S = 2**20 / CHIP.hbm_bytes_per_s
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"1500000"}}'
MILLISECOND = 1e-3
"""The time of 1,500,000 cycles at the clock of v5e."""

BODIES = """
%fused (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %conv = f32[8]{0} convolution(%x, %x), dim_labels=bf_io->bf
}

%gathered (x3: f32[262144]) -> f32[1024] {
  %x3 = f32[262144]{0} parameter(0)
  ROOT %g = f32[1024]{0} gather(%x3, %x3), slice_sizes={1024}
}

%scattered (x4: f32[262144], u4: f32[1024]) -> f32[262144] {
  %x4 = f32[262144]{0} parameter(0)
  %u4 = f32[1024]{0} parameter(1)
  ROOT %g4 = f32[262144]{0} scatter(%x4, %u4, %u4), to_apply=%fused
}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {
  %s = (s32[], f32[8]) parameter(0)
  %v = f32[8]{0} get-tuple-element(%s), index=1
  ROOT %inner = f32[8]{0} fusion(%v), kind=kOutput, calls=%fused, metadata={op_name="jit(f)/OF"}, CYCLES
}

%condition (s: (s32[], f32[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(5)
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%open (s: (s32[], f32[8])) -> pred[] {
  %t2 = (s32[], f32[8]) parameter(0)
  %i2 = s32[] get-tuple-element(%t2), index=0
  %n2 = s32[] get-tuple-element(%t2), index=0
  ROOT %lt2 = pred[] compare(%i2, %n2), direction=LT
}
"""


def time_of(*lines: str, scope="rest", turns=None, turn_of: str | None = None) -> ProgramTime:
    entry = "\n".join(f"  {line}" for line in lines)
    text = f"HloModule jit_f, is_scheduled=true\n{BODIES}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{entry}\n}}\n"
    text = text.replace("CYCLES", CYCLES).replace("OF", scope)
    return program_time(text, CHIP, bundles={}, turns=turns or {}, turn_of=turn_of)


WORK = '%w = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused, metadata={op_name="jit(f)/add"}, CYCLES'
LOOP = '%l = (s32[], f32[8]) while(%p), condition=%condition, body=%body, metadata={op_name="jit(f)/while"}'
OPEN = '%o = (s32[], f32[8]) while(%p), condition=%open, body=%body, metadata={op_name="jit(f)/jvp(lm_head)/while"}'


def test_a_loop_counts_as_often_as_its_condition_says():
    assert time_of(WORK, LOOP).compute_s == pytest.approx(6 * MILLISECOND)
    known = LOOP.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert time_of(known).compute_s == pytest.approx(7 * MILLISECOND)


def test_a_loop_that_depends_on_data_needs_its_count():
    with pytest.raises(InputError, match=r"%?o \(jit\(f\)/jvp\(lm_head\)/while\)"):
        time_of(OPEN)
    assert time_of(OPEN, turns={"lm_head": 3}).compute_s == pytest.approx(3 * MILLISECOND)
    assert time_of(WORK, OPEN, turns={}, turn_of="jvp(lm_head)").compute_s == pytest.approx(MILLISECOND)


@pytest.mark.parametrize(
    "scope, part",
    [
        ("attention/dot_general", "attention"),
        ("transpose(jvp(lm_head))/mul", "LM head"),
        ("attention_norm/dot_general", "matrix products"),
    ],
)
def test_time_belongs_to_a_part_of_the_network(scope, part):
    parts = time_of(LOOP, scope=scope).parts
    assert parts == {part: pytest.approx(5 * MILLISECOND)}


def test_an_instruction_without_estimate_costs_the_bytes_that_it_moves():
    copy = f"%c = {MEGABYTE} copy(%big)"
    big = f"%big = {MEGABYTE} parameter(0)"
    assert time_of(big, copy).compute_s == pytest.approx(2 * MEBIBYTE_S)
    # A slice reads no more than it yields, and an update no more than it writes.
    assert time_of(big, "%s = f32[1024]{0} slice(%big), slice={[0:1024]}").compute_s == pytest.approx(MEBIBYTE_S / 128)
    update = f"%u = {MEGABYTE} dynamic-update-slice(%big, %p1, %i)"
    small = "%p1 = f32[1024]{0} parameter(1)"
    assert time_of(big, small, update).compute_s == pytest.approx(MEBIBYTE_S / 128)
    gathered = "%g = f32[1024]{0} fusion(%big), kind=kCustom, calls=%gathered"
    assert time_of(big, gathered).compute_s == pytest.approx(MEBIBYTE_S / 128)
    scattered = f"%g = {MEGABYTE} fusion(%big, %p1), kind=kCustom, calls=%scattered"
    in_place = '{"aliasing_operands":{"lists":[{"indices":["0","2"]}]}}'
    assert time_of(big, small, f"{scattered}, backend_config={in_place}").compute_s == pytest.approx(MEBIBYTE_S / 128)
    assert time_of(big, small, scattered).compute_s == pytest.approx((2 + 1 / 256) * MEBIBYTE_S)


def gather(tail: str = "") -> tuple[str, str]:
    start = f"%s = (f32[32768]{{0}}, {MEGABYTE}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={{0}}"
    return start, f"%d = {MEGABYTE} all-gather-done(%s){tail}"


RING_S = 2**20 * 7 / 8 / CHIP.ring_bytes_per_s


def test_only_the_time_of_a_collective_that_no_work_covers_counts():
    start, done = gather()
    exposed = time_of(start, done)
    assert exposed.exposed_collective_s == exposed.parts["collectives"] == pytest.approx(RING_S)
    hidden = time_of(start, WORK, done)
    assert (hidden.exposed_collective_s, hidden.compute_s) == (0, pytest.approx(MILLISECOND))
    assert exposed.collective_bytes == hidden.collective_bytes
    # Work after its end hides nothing.
    late = time_of(start, done, WORK)
    assert late.exposed_collective_s == exposed.exposed_collective_s


@pytest.mark.parametrize(
    "opcode, groups, factor",
    [
        ("all-reduce", "replica_groups={{0,1,2,3},{4,5,6,7}}", 2 * 3 / 4),
        ("all-gather", "replica_groups=mesh['axis_0'=8,'axis_1'=2] {'axis_0'}", 7 / 8),
        ("reduce-scatter", "replica_groups=[1,8]<=[8]", 7),
        ("collective-permute", "source_target_pairs={{0,1},{1,0}}", 1),
    ],
)
def test_collectives_send_the_bytes_of_a_ring(opcode, groups, factor):
    time = time_of(f"%c = {MEGABYTE} {opcode}(%p), {groups}")
    assert time.collective_bytes == {opcode: pytest.approx(factor * 2**20)}
    bandwidth = CHIP.link_bytes_per_s if opcode == "collective-permute" else CHIP.ring_bytes_per_s
    assert time.exposed_collective_s == pytest.approx(factor * 2**20 / bandwidth)


def test_a_collective_inside_a_fusion_counts():
    text = f"""HloModule jit_f

%scattered (x: f32[8]) -> f32[8] {{
  %r = {MEGABYTE} all-reduce(%x), replica_groups=[1,8]<=[8]
  ROOT %part = f32[32768]{{0}} dynamic-slice(%r)
}}

ENTRY %main () -> f32[8] {{
  %f = f32[32768]{{0}} fusion(%p), kind=kCustom, calls=%scattered
}}
"""
    found = program_time(text, CHIP, bundles={}, turns={})
    assert found.collective_bytes == {"reduce-scatter": pytest.approx(2**20 * 7 / 8)}


@pytest.mark.parametrize("start, names", [("async", "calls"), ("call", "to_apply")])
def test_a_wrapped_collective_runs_in_the_background(start: str, names: str) -> None:
    text = f"""HloModule jit_f

%wrapped (x: f32[8]) -> f32[8] {{
  %r = {MEGABYTE} reduce-scatter(%x), replica_groups=[1,8]<=[8], dimensions={{0}}
}}

ENTRY %main () -> f32[8] {{
  %s = ((f32[2097152]), {MEGABYTE}, u32[]{{:S(4)}}) {start}-start(%p), {names}=%wrapped
  %d = {MEGABYTE} {start}-done(%s), {names}=%wrapped
}}
"""
    found = program_time(text, CHIP, bundles={}, turns={})
    assert found.collective_bytes == {"reduce-scatter": 7 * 2**20}
    assert found.exposed_collective_s == found.estimated_s == pytest.approx(7 * 2**20 / CHIP.ring_bytes_per_s)
