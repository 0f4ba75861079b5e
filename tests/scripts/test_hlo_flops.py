"""Tests of counting the FLOPs of compiled programs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from scripts.bench.hlo_flops import product_flops
from scripts.bench.kernel_time import ROUTED_ROWS


def test_a_product_in_a_loop_counts_as_often_as_it_runs():
    def network(weights: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0])

    weights, x = jnp.ones((5, 32, 32)), jnp.ones((16, 32))
    text = jax.jit(jax.grad(network, argnums=(0, 1))).lower(weights, x).compile().as_text()
    assert product_flops(text or "", {}) == {"other": 3 * 5 * 2 * 16 * 32 * 32}


def test_a_dim_of_a_batch_that_xla_writes_as_a_window_multiplies_once():
    window = "window={size=4 stride=3 lhs_dilate=4}, dim_labels=0bf_0io->0bf"
    assert flops_of(f"f32[4,8,16] convolution(%a, %b), {window}", a="f32[4,8,32]", b="f32[4,32,16]") == {
        "other": 4 * 2 * 8 * 32 * 16
    }


def test_a_grouped_product_counts_the_rows_of_its_devices_experts():
    kernel = 'custom-call(%a, %b), custom_call_target="tpu_custom_call"'
    found = flops_of(f"f32[64,16] {kernel}", a="f32[64,32]", b="f32[4,32,16]", name="ragged-dot-none.3")
    assert found == flops_of(f"f32[4,32,16] {kernel}", a="f32[64,32]", b="f32[64,16]", name="tgmm.1")
    assert found == {"grouped": 2 * 24 * 32 * 16}
    assert flops_of(f"f32[64,16] {kernel}", a="f32[64,32]", b="f32[4,32,16]", name="attention_forward.1") == {}


def flops_of(instruction: str, *, a: str, b: str, name: str = "c") -> dict[str, Any]:
    lines = (f"%a = {a} parameter(0)", f"%b = {b} parameter(1)", f"ROOT %{name} = {instruction}")
    text = "HloModule jit_f\n\nENTRY %main (a: f32[1], b: f32[1]) -> f32[1] {\n  " + "\n  ".join(lines) + "\n}\n"
    return dict(product_flops(text, {ROUTED_ROWS: 24}))
