"""Networks with quantized kernels, and their dequantized weights."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from numpy.typing import ArrayLike

from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.quantization import CODES, SCALES, KernelQuantizer


def dequantized(held: KernelQuantizer, codes: ArrayLike, scales: ArrayLike) -> jax.Array:
    @jax.jit
    def dequantize(codes: jax.Array, scales: jax.Array) -> jax.Array:
        kernel, factors = held.dequantize(codes, scales, depends_on=jnp.zeros((1, 1, 1)))
        return kernel if factors is None else kernel * factors

    return dequantize(codes, scales)


def dequantized_params(definition: DecoderDefinition, params: Params) -> Params:
    """Returns the weights with float kernels, for the same network without quantization, on the host."""
    flat = {path: np.asarray(x) for path, x in flatten_by_path(params).items()}
    floats = {path: x for path, x in flat.items() if path[-1] not in (CODES, SCALES)}
    for path in (path for path in flat if path[-1] == CODES):
        held, kernel = definition.quantizer(path), (*path[:-1], "kernel")
        layers = zip(flat[path], flat[*path[:-1], SCALES], strict=True)
        floats[kernel] = np.stack([dequantized(held, *layer) for layer in layers])
    return unflatten_dict(floats)
