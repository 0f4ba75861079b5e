"""Tests of the estimated time of compiled programs: seconds are counted, nothing is compiled or timed."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from app.mesh.chips import TPU_CHIPS
from scripts.bench.program_time import program_time
from settings.errors import InputError

CHIP = TPU_CHIPS["v5e"]
MEGABYTE = "f32[262144]{0:T(1024)}"
WORK_S, TURNS = 1e-3, 5
"""The time of 1,500,000 cycles at the clock of v5e, and the turns of a loop."""
PROGRAM = f"""HloModule jit_f, is_scheduled=true

%fused (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  ROOT %conv = f32[8]{{0}} convolution(%x, %x), dim_labels=bf_io->bf
}}

%body (s: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %s = (s32[], f32[8]) parameter(0)
  %v = f32[8]{{0}} get-tuple-element(%s), index=1
  ROOT %inner = f32[8]{{0}} fusion(%v), kind=kOutput, calls=%fused, metadata={{op_name="jit(f)/attention/dot"}}, CYCLES
}}

%condition (s: (s32[], f32[8])) -> pred[] {{
  %n = s32[]{{:T(128)}} constant({TURNS})
  %t = (s32[], f32[8]) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%t), index=0
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  %big = {MEGABYTE} parameter(1)
  %s = (f32[32768]{{0}}, {MEGABYTE}) all-gather-start(%p), replica_groups=[1,8]<=[8], dimensions={{0}}
  %w = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%fused, metadata={{op_name="jit(f)/add"}}, CYCLES
  %d = {MEGABYTE} all-gather-done(%s)
  %r = {MEGABYTE} all-reduce(%d), replica_groups={{{{0,1,2,3}},{{4,5,6,7}}}}
  %c = {MEGABYTE} copy(%big)
  ROOT %l = (s32[], f32[8]) while(%p), condition=%condition, body=%body, metadata={{op_name="jit(f)/while"}}
}}
""".replace("CYCLES", 'backend_config={"window_config":{"estimated_cycles":"1500000"}}')


def test_a_programs_time_is_that_of_its_cycles_its_bytes_and_the_collectives_that_nothing_covers() -> None:
    time = program_time(PROGRAM, CHIP, bundles={}, turns={})
    exposed_s = 2 * 3 / 4 * 2**20 / CHIP.ring_bytes_per_s
    copy_s = 2 * 2**20 / CHIP.hbm_bytes_per_s
    # The gather ends before the work that was started after it.
    assert time.exposed_collective_s == pytest.approx(exposed_s)
    assert dict(time.parts) == {
        "matrix products": pytest.approx(WORK_S),
        "attention": pytest.approx(TURNS * WORK_S),
        "rest": pytest.approx(copy_s),
        "collectives": pytest.approx(exposed_s),
    }
    assert time.estimated_s == pytest.approx((1 + TURNS) * WORK_S + copy_s + exposed_s)


def test_a_kernel_takes_the_longer_of_its_instructions_and_its_copies() -> None:
    block, array = (8, 128), jax.ShapeDtypeStruct((64, 128), jnp.float32)
    by_row, by_turn = pl.BlockSpec(block, lambda i, j: (i, 0)), pl.BlockSpec(block, lambda i, j: (j, 0))
    call = pl.pallas_call(copy_kernel, grid=(4, 8), in_specs=[by_turn], out_specs=by_row, out_shape=array)
    lowered = jax.jit(call).trace(array).lower(lowering_platforms=("tpu",)).as_text()
    body = re.search(r"\\22body\\22: \\22([^\\]+)\\22", lowered)
    assert body, lowered
    config = f'backend_config={{"custom_call_config":{{"body":"{body[1]}"}}}}'
    line = f'%turned.7 = f32[64,128] custom-call(%p), custom_call_target="tpu_custom_call", {config}'
    program = f"HloModule jit_f\n\nENTRY %main () -> f32[64,128] {{\n  {line}\n}}\n"

    def kernel_s(bundles: int) -> float:
        time = program_time(program, CHIP, bundles={"turned": bundles}, turns={})
        assert time.estimated_s == time.kernel_s
        return time.kernel_s

    assert kernel_s(3_000) == pytest.approx(4 * 8 * 3_000 / CHIP.clock_hz)
    # The result's block changes with the outer index only.
    assert kernel_s(1) == pytest.approx((32 + 4) * 8 * 128 * 4 / CHIP.hbm_bytes_per_s)
    with pytest.raises(InputError, match=r"no schedule of the kernel turned.*pip install -e '\.\[tpu\]'"):
        program_time(program, CHIP, bundles={}, turns={})


def copy_kernel(*refs: Any) -> None:
    *_, source, target = refs
    target[...] = source[...]
