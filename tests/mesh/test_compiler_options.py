"""Tests the effects of the compiler's options."""

import jax
import jax.numpy as jnp

from app.mesh.compiler_options import compiler_options
from tests.tiny import make_mesh


def test_cpus_convert_frozen_bfloat16_kernels_one_layer_at_a_time() -> None:
    inputs, stack = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 256), (16, 256, 512)))

    def layers(x: jax.Array, kernels: jax.Array) -> jax.Array:
        def layer(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, None]:
            hidden = jnp.dot(x, kernel, preferred_element_type=jnp.float32).astype(x.dtype)
            return jnp.dot(hidden, kernel.T, preferred_element_type=jnp.float32).astype(x.dtype), None

        return jax.lax.scan(layer, x, kernels)[0]

    quickest = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        options = compiler_options(make_mesh(), packed_rows=True)
        program = jax.jit(layers, compiler_options=options).lower(inputs, stack).compile()
    finally:
        jax.config.update("jax_disable_most_optimizations", quickest)
    memory, in_float32 = program.memory_analysis(), 4 * stack.size
    assert memory is not None and memory.temp_size_in_bytes < in_float32 / 4
