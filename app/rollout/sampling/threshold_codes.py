"""Integer codes that sort like the numbers they encode, so that a number can be searched bit by bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Int32, Num

CODE_OF_MINUS_INFINITY = -0x7F800001


def lowest_code(dtype: DTypeLike) -> int:
    return jnp.iinfo(jnp.int32).min if dtype == jnp.float32 else 0


def value_of_code(codes: Int32[Array, "*dims"], dtype: DTypeLike) -> Num[Array, "*dims"]:
    """Returns the numbers that these codes stand for; float32 numbers are decoded from bits, integers unchanged."""
    if dtype != jnp.float32:
        return codes
    # Codes beyond infinity would be NaN; clamp them.
    codes = jnp.maximum(codes, CODE_OF_MINUS_INFINITY)
    bits = jnp.where(codes < 0, codes ^ jnp.iinfo(jnp.int32).max, codes)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
