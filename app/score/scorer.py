"""Per-token logprobs of given samples under given weights: the policy's or the reference's."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float32

from app.batching.micro_batches import common_row_shape, plan_micro_batches
from app.batching.pack import TokenBatch, pack_tokens, unpack_per_token
from app.batching.row_logprobs import row_logprobs
from app.flow import Sample
from app.mesh.placement import row_sharding, to_global, to_local
from app.policy.decoder import DecoderDefinition, Params


class Scorer:
    """Compiled scoring for one decoder on one mesh. Holds no weights.

    Args:
        logits_chunk: tokens of a row that pass the LM head at once.
    """

    def __init__(self, definition: DecoderDefinition, mesh: Mesh, *, dtype: jnp.dtype, logits_chunk: int):
        self.mesh = mesh

        def score(params: Params, batch: TokenBatch, temperature: Array) -> Array:
            decoder = definition.bind(params)

            def micro_batch(rows: TokenBatch) -> Array:
                logprobs, _ = row_logprobs(
                    decoder, rows, temperature=temperature, dtype=dtype, remat="none", logits_chunk=logits_chunk
                )
                return logprobs

            return jax.lax.map(micro_batch, batch)

        self._score = jax.jit(score, out_shardings=row_sharding(mesh, row_dim=1))

    def logprobs(
        self, params: Params, samples: Sequence[Sample], *, temperature: float, rows_per_device: int
    ) -> list[Float32[np.ndarray, "C"]]:
        """One array per sample: log_softmax(logits / temperature) of each completion token.

        `temperature` is the sampler's; 1 for greedy samples. Rows go in fixed micro-batches of
        `rows_per_device` a device; the result does not depend on it.
        """
        shape = common_row_shape(samples)
        plan = plan_micro_batches(len(samples), self.mesh, rows_per_device=rows_per_device)
        batch = to_global(self.mesh, pack_tokens(samples, plan, shape), row_dim=1)
        with jax.set_mesh(self.mesh):
            scored = self._score(params, batch, jnp.float32(temperature or 1.0))
        return unpack_per_token(to_local(scored, row_dim=1), samples, plan)
