"""Tests that the turns of attention are those of what `model.attention` chooses, for a TPU that is not there."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.typing import DTypeLike

from app.mesh import devices
from app.mesh.axis_rules import AXES
from app.mesh.chips import parse_slice
from app.mesh.compile_only import compile_only_devices
from app.mesh.placement import row_sharding
from app.model.attention.dense import ATTENTION_SCOPE
from app.model.attention.packed import packed_attention, platform_blocking
from app.model.segment_layout import SegmentLayout
from app.preflight.program_time import program_time
from app.preflight.program_work import generation_work
from app.rollout.batch_engine import BatchShape
from tests.tiny import EVEN, make_mesh


@pytest.fixture(autouse=True)
def libtpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips a test without TPU compiler, and ends the simulation of a slice with the test."""
    pytest.importorskip("libtpu", reason="libtpu is not installed: pip install -e '.[tpu]'")
    monkeypatch.setattr(devices, "_simulated_slice", None)
    monkeypatch.setattr(devices, "_simulated_devices", None)


@pytest.mark.parametrize(
    ("implementation", "turns"),
    # 8 blocks of 512 tokens have 36 pairs.
    [("xla", 36), ("auto", 36), ("kernel", 36)],
)
def test_turns_are_those_of_loops_or_of_the_kernel(implementation, turns):
    tpu = Mesh(np.array(compile_only_devices(parse_slice("v5e-1"))).reshape(1, 1, 1), AXES)
    architecture = replace(EVEN, attention_implementation=implementation)
    shape = BatchShape(num_prompts=1, num_rows=1, prompt_length=4096, cache_length=4096, num_new=0)
    work = generation_work(architecture, tpu, jnp.float32, shape)
    assert work["prefill"].turns == {ATTENTION_SCOPE: turns}
    others = generation_work(EVEN, make_mesh(), jnp.float32, shape)
    assert [one.model_flops for one in work.values()] == [one.model_flops for one in others.values()]
    # Inside a window of 512, blocks of 512 see themselves and the block before: 15 pairs.
    windowed = generation_work(replace(EVEN, windows=(512, None)), tpu, jnp.float32, shape)["prefill"]
    assert windowed.turns[ATTENTION_SCOPE] == (15 + 36 + 1) // 2


def test_decoding_has_as_many_turns_as_blocks_that_rows_see():
    tpu = Mesh(np.array(compile_only_devices(parse_slice("v5e-1"))).reshape(1, 1, 1), AXES)
    shape = BatchShape(num_prompts=1, num_rows=3, prompt_length=4096, cache_length=4096, num_new=0)

    def turns(mesh: Mesh, **changes: Any) -> dict:
        return dict(generation_work(replace(EVEN, **changes), mesh, jnp.float32, shape)["decode"].turns)

    assert turns(tpu) == {ATTENTION_SCOPE: 3 * 8}
    # Inside a window of 513, the last token also sees the last of the block before its own.
    assert turns(tpu, windows=(513, None)) == {ATTENTION_SCOPE: 3 * (2 + 8) // 2}
    assert turns(tpu, attention_implementation="xla") == turns(make_mesh()) == {}


def test_each_turn_of_xlas_loop_over_pairs_adds_to_the_estimate() -> None:
    place = parse_slice("v5e-1")
    tpu = Mesh(np.array(compile_only_devices(place)).reshape(1, 1, 1), AXES)

    def on_tpu(shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=row_sharding(tpu))

    query, keys = on_tpu((1, 1024, 2, 16), jnp.bfloat16), on_tpu((1, 1, 1024, 16), jnp.bfloat16)
    layout = SegmentLayout(*[on_tpu((1, 1024), jnp.int32)] * 3)
    with jax.set_mesh(tpu):
        blocking = platform_blocking(1024, 16, jnp.bfloat16, "xla", group_size=2)
        attend = jax.jit(functools.partial(packed_attention, blocking=blocking))
        text = attend.lower(query, keys, keys, layout).compile().as_text() or ""
    once, twice, thrice = (
        program_time(text, place.chip, bundles={}, turns={ATTENTION_SCOPE: turns}).parts["attention"]
        for turns in (1, 2, 3)
    )
    assert thrice - twice == pytest.approx(twice - once) and 0 < twice - once < once
