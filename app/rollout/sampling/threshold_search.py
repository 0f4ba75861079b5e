"""Search for the value at which the weights of all greater ones reach a limit, in a fixed number of passes.

Source: radix select, Alabi et al. 2012, "Fast k-selection algorithms for graphics processing units".
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32, Num

from app.mesh.axis_rules import current_device, shard_map_by_dims, spread_rows
from app.mesh.chips import kernel_bytes
from app.rollout.sampling.threshold_codes import lowest_code, value_of_code

BITS_PER_PASS = {"cpu": 1}
"""Bits that a pass decides by platform. On others, reading takes as long as several comparisons."""


def lowest_reached(
    values: Num[Array, "B V"], weights: Int32[Array, "B V"] | None, limits: Int32[Array, "B"], *, num_bits: int = 32
) -> Num[Array, "B"]:
    """Returns the lowest value of each row of which the weights of all greater ones add up to less than the limit.

    Where all weights together are below the limit, it is the lowest number that there can be. Each device searches rows
    of its own, over the whole vocabulary.

    Args:
        values: float32, or integers below 2^num_bits, of which negative ones are left out.
        weights: none is negative, and those of a row add up to less than 2^31; None for 1 each.
        limits: at least 1.
    """
    platform, kind = current_device()
    search = functools.partial(_search, num_bits=num_bits, bits_per_pass=BITS_PER_PASS.get(platform, 4))
    if platform == "tpu":
        # Pallas is slow to import and not needed elsewhere.
        from app.rollout.sampling import threshold_kernel

        available = kernel_bytes(kind)
        if threshold_kernel.num_buffers(values.shape[1], available):
            search = functools.partial(threshold_kernel.search, num_bits=num_bits, available_bytes=available)
    dims = spread_rows(len(values)), "tokens"
    in_dims = (dims, None if weights is None else dims, dims[:1])
    by_device = shard_map_by_dims(lambda *rows: (search(*rows),), in_dims=in_dims, out_dims=(dims[:1],))
    return value_of_code(by_device(values, weights, limits)[0], values.dtype)


def _search(
    values: Num[Array, "B V"],
    weights: Int32[Array, "B V"] | None,
    limits: Int32[Array, "B"],
    *,
    num_bits: int,
    bits_per_pass: int,
) -> Int32[Array, "B"]:
    """Returns the codes of what `lowest_reached` returns."""
    num_passes = -(-num_bits // bits_per_pass)

    def add_digit(number: Array, found: Array) -> Array:
        shift = bits_per_pass * (num_passes - 1 - number)
        # A value of the digit is too low if even the greatest number that has it has the limit above it.
        digit = jnp.zeros_like(found)
        for higher in range(1, 2**bits_per_pass):
            greatest = value_of_code(found + (jnp.int32(higher) << shift) - 1, values.dtype)
            is_above = values > greatest[:, None]
            digit += jnp.sum(jnp.where(is_above, 1 if weights is None else weights, 0), axis=-1) >= limits
        return found + (digit << shift)

    return jax.lax.fori_loop(0, num_passes, add_digit, jnp.full_like(limits, lowest_code(values.dtype)))
