"""Dequantizes the weights of networks with quantized kernels."""

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict

from app.model.decoder import DecoderDefinition, Params, flatten_by_path
from app.model.quantization import CODES, SCALES


def dequantized_params(definition: DecoderDefinition, params: Params) -> Params:
    """Returns the weights with float kernels, for the same network without quantization, on the host."""
    flat = {path: np.asarray(x) for path, x in flatten_by_path(params).items()}
    coded = [path[:-1] for path in flat if path[-1] == CODES]

    def dequantize(path: tuple[str, ...], codes: jax.Array, scales: jax.Array) -> jax.Array:
        held = definition.quantizer((*path, CODES))
        kernel, factors = held.dequantize(codes, scales, depends_on=jnp.zeros((1, 1, 1)))
        return kernel if factors is None else kernel * factors

    @jax.jit
    def kernels(layers: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [dequantize(path, *layer) for path, layer in zip(coded, layers, strict=True)]

    pairs = [(flat[*path, CODES], flat[*path, SCALES]) for path in coded]
    by_layer = [kernels([(codes[i], scales[i]) for codes, scales in pairs]) for i in range(len(pairs[0][0]))]
    floats = {path: x for path, x in flat.items() if path[-1] not in (CODES, SCALES)}
    floats |= {(*path, "kernel"): np.stack(of) for path, of in zip(coded, zip(*by_layer, strict=True), strict=True)}
    return unflatten_dict(floats)
