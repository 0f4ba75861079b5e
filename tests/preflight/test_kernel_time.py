"""Tests of the time of Pallas kernels, on kernels as JAX hands them to the compiler: nothing is compiled or run."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from app.mesh.chips import TPU_CHIPS
from app.model.grouped_product import TILE_ROWS, tgmm_product
from app.preflight.kernel_time import ROUTED_ROWS, take_scheduled_bundles
from app.preflight.program_time import program_time
from settings.errors import InputError

CHIP = TPU_CHIPS["v5e"]
BLOCK = (8, 128)
BLOCK_S = 8 * 128 * 4 / CHIP.hbm_bytes_per_s
"""The time to copy a block of float32."""


def copy_kernel(*refs: Any) -> None:
    *_, source, target = refs
    target[...] = source[...]


def calling(call: Any, *shapes: jax.ShapeDtypeStruct) -> str:
    """Returns a program with one kernel, whose author's metadata spans lines as that of JAX's splash attention does."""
    text = jax.jit(call).trace(*shapes).lower(lowering_platforms=("tpu",)).as_text()
    body = re.search(r"\\22body\\22: \\22([^\\]+)\\22", text)
    assert body, text
    metadata = 'frontend_attributes={kernel_metadata={\n"xprof_metadata":"{\\"block\\": 8}"\n}}'
    config = f'backend_config={{"custom_call_config":{{"body":"{body[1]}"}}}}'
    line = f'%turned.7 = f32[64,128] custom-call(%p), custom_call_target="tpu_custom_call", {metadata}, {config}'
    return f"HloModule jit_f\n\nENTRY %main () -> f32[64,128] {{\n  {line}\n}}\n"


def kernel_s(program: str, *, bundles: int, pairs: int | None = None) -> float:
    turns = {} if pairs is None else {"attention": pairs}
    time = program_time(program, CHIP, bundles={"turned": bundles}, turns=turns)
    assert (time.estimated_s, dict(time.parts)) == (time.kernel_s, {"rest": time.kernel_s})
    return time.kernel_s


X = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def test_a_kernel_takes_a_cycle_for_each_bundle_and_turn_of_its_own_grid():
    spec = pl.BlockSpec(BLOCK, lambda i, j: (i, 0))
    call = pl.pallas_call(copy_kernel, grid=(8, 5), in_specs=[spec], out_specs=spec, out_shape=X)
    assert kernel_s(calling(call, X), bundles=3_000) == pytest.approx(8 * 5 * 3_000 / CHIP.clock_hz)


def test_a_grouped_product_has_a_turn_for_each_block_of_rows_and_each_group_that_begins_within_one():
    rows = [jax.ShapeDtypeStruct((4 * TILE_ROWS, 128), jnp.bfloat16)] * 2
    program = calling(tgmm_product, *rows, jax.ShapeDtypeStruct((8,), jnp.int32)).replace("turned", "tgmm")

    def seconds(num_rows: int) -> float:
        time = program_time(program, CHIP, bundles={"tgmm": 9_000}, turns={ROUTED_ROWS: num_rows})
        assert dict(time.parts) == {"matrix products": time.kernel_s}
        return time.kernel_s

    a_turn = 9_000 / CHIP.clock_hz
    assert seconds(4 * TILE_ROWS) == pytest.approx((4 + 7) * a_turn)
    # Of eight experts at most three have a row.
    assert seconds(3) == pytest.approx((1 + 2) * a_turn)


def test_a_kernel_takes_at_least_the_time_of_its_copies():
    by_row, by_turn = pl.BlockSpec(BLOCK, lambda i, j: (i, 0)), pl.BlockSpec(BLOCK, lambda i, j: (j, 0))
    call = pl.pallas_call(copy_kernel, grid=(4, 8), in_specs=[by_turn], out_specs=by_row, out_shape=X)
    # The result's block changes with the outer index only.
    assert kernel_s(calling(call, X), bundles=1) == pytest.approx((32 + 4) * BLOCK_S)


def test_the_turns_of_a_grid_that_depends_on_data_are_given():
    def call(count: jax.Array, x: jax.Array) -> jax.Array:
        spec = pl.BlockSpec(BLOCK, lambda k, p, block: (block[p], 0))
        held = pl.BlockSpec(
            (64, 128), lambda k, p, block: (jax.lax.shift_right_logical(block[p], 3), 0), pipeline_mode=pl.Buffered(1)
        )
        grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=(2, count[0]), in_specs=[spec], out_specs=held)
        return pl.pallas_call(lambda blocks, source, target: None, grid_spec=grid, out_shape=X)(count, x)

    program = calling(call, jax.ShapeDtypeStruct((16,), jnp.int32), X)
    assert kernel_s(program, bundles=900, pairs=11) == pytest.approx(2 * 11 * 900 / CHIP.clock_hz)
    # A block that is held for many turns is not counted.
    assert kernel_s(program, bundles=0, pairs=11) == pytest.approx(2 * 11 * BLOCK_S)


def test_a_kernel_without_a_grid_has_one_turn():
    program = calling(pl.pallas_call(copy_kernel, out_shape=X), X)
    assert kernel_s(program, bundles=1_000_000) == pytest.approx(1_000_000 / CHIP.clock_hz)


def test_a_kernel_without_a_schedule_has_no_time():
    program = calling(pl.pallas_call(copy_kernel, out_shape=X), X)
    with pytest.raises(InputError, match=r"no schedule of the kernel turned.*pip install -e '\.\[tpu\]'"):
        program_time(program, CHIP, bundles={}, turns={})


def test_only_schedules_of_kernels_count_and_of_equal_names_the_longest(tmp_path):
    schedule = "Schedule analysis:\n\ttotal scheduled bundles:    {}\n\t%x = custom-call(), custom_call_target={}"
    for name, bundles, target in (
        ("17-attention_forward.1", 40, '"tpu_custom_call"'),
        ("18-attention_forward.2", 70, '"tpu_custom_call"'),
        ("19-splash_mha_fwd.4", 50, '"tpu_custom_call"'),
        ("20-add_fusion.3", 90, "none"),
        ("21-ragged-dot-none", 30, '"tpu_custom_call"'),
        ("22-ragged-dot-none.1", 20, '"tpu_custom_call"'),
    ):
        path = tmp_path / f"{name}-00-schedule-analysis_final_bundles.txt"
        path.write_text(schedule.format(bundles, target))
    expected = {"attention_forward": 70, "splash_mha_fwd": 50, "ragged-dot-none": 30}
    assert take_scheduled_bundles(tmp_path) == expected
    assert list(tmp_path.iterdir()) == []
