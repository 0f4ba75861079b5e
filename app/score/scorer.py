"""Per-token logprobs and values of samples under the weights of the policy, the reference or the critic."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.stages import Lowered
from jaxtyping import Array, Float32, Int32

from app.batching.forward_passes import critic_values, row_logprobs
from app.batching.micro_batch_plan import MicroBatchPlan
from app.batching.token_batch import TokenBatch, pack_tokens, unpack_per_token
from app.mesh.compiler_options import compiler_options
from app.mesh.placement import row_sharding, to_global, to_local
from app.model.architecture import RouteShape
from app.model.decoder import DecoderDefinition, Params
from app.records.sample import Sample

BatchRunner = Callable[[Params, Iterable[TokenBatch], np.float32], list[np.ndarray]]
"""(weights, this host's micro-batches, temperature) -> logprobs or values [R, C] of the targets of each micro-batch."""

NUM_PREFETCHED = 2
"""Number of micro-batches sent to the devices ahead of the one being computed."""


class PackedForward:
    """A compiled forward pass over micro-batches of packed rows; the weights are an argument of each call.

    Args:
        forward: (weights, rows, temperature) -> one logprob or value per target, [R, C].
        route_shape: shape of each token's routes to replay; None = no replay.
    """

    def __init__(
        self,
        forward: Callable[[Params, TokenBatch, Array], Array],
        mesh: Mesh,
        *,
        route_shape: RouteShape | None = None,
    ):
        self.mesh, self.route_shape = mesh, route_shape

        def scan(params: Params, stacked: TokenBatch, temperature: Array) -> Array:
            return jax.lax.map(lambda rows: forward(params, rows, temperature), stacked)

        options = compiler_options(mesh, packed_rows=True)
        self._forward = jax.jit(forward, out_shardings=row_sharding(mesh), compiler_options=options)
        self._scan = jax.jit(scan, out_shardings=row_sharding(mesh, row_dim=1), compiler_options=options)

    def per_token(
        self,
        params: Params,
        samples: Sequence[Sample],
        plan: MicroBatchPlan,
        *,
        temperature: float = 1.0,
        runner: BatchRunner | None = None,
    ) -> list[Float32[np.ndarray, "C"]]:
        """Returns a logprob or value for each completion token of each sample, in the order of `samples`.

        Args:
            plan: this host's plan; all hosts have the same number and shapes of micro-batches.
            temperature: the sampler's temperature; 0 (greedy) counts as 1.
            runner: `run_looped` or `run_scanned`; None = `run_looped`.
        """
        batches = (pack_tokens(samples, one, self.route_shape) for one in plan.micro_batches)
        with jax.set_mesh(self.mesh):
            packed = (runner or self.run_looped)(params, batches, np.float32(temperature or 1.0))
        return unpack_per_token(packed, samples, plan)

    def run_looped(self, params: Params, batches: Iterable[TokenBatch], temperature: np.float32) -> list[np.ndarray]:
        """Runs micro-batches in a Python loop, with one compiled program per shape.

        While one micro-batch is computed, the next `NUM_PREFETCHED` are packed and sent; no others are in memory.
        """
        scored: list[np.ndarray] = []
        waiting: deque[Array] = deque()
        for batch in batches:
            waiting.append(self._forward(params, to_global(self.mesh, batch), temperature))
            if len(waiting) > NUM_PREFETCHED:
                scored.append(to_local(waiting.popleft()))
        return scored + [to_local(per_target) for per_target in waiting]

    def lower(self, params: Params, batch: TokenBatch) -> Lowered:
        """Lowers the program of one micro-batch; the arguments are shapes with shardings."""
        with jax.set_mesh(self.mesh):
            return self._forward.lower(params, batch, np.float32(1))

    def run_scanned(self, params: Params, batches: Iterable[TokenBatch], temperature: np.float32) -> list[np.ndarray]:
        """Runs micro-batches of equal shape in one `lax.map`; compiles one program per number of micro-batches."""
        stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *batches)
        scored = self._scan(params, to_global(self.mesh, stacked, row_dim=1), temperature)
        return list(to_local(scored, row_dim=1))


class Scorer(PackedForward):
    """Computes logprobs with a language model: log_softmax(logits / temperature) of each completion token.

    Args:
        logits_chunk: number of tokens per device that pass through the LM head at once.
        replays_routes: whether tokens use the experts recorded in the samples' routes.
    """

    def __init__(
        self,
        definition: DecoderDefinition,
        mesh: Mesh,
        *,
        dtype: jnp.dtype,
        logits_chunk: int,
        replays_routes: bool = False,
    ):
        def score(params: Params, rows: TokenBatch, temperature: Array) -> Array:
            return row_logprobs(
                definition.bind(params),
                rows,
                temperature=temperature,
                dtype=dtype,
                remat="none",
                logits_chunk=logits_chunk,
            ).logprobs

        super().__init__(score, mesh, route_shape=definition.architecture.route_shape if replays_routes else None)


class ValueScorer(PackedForward):
    """Computes the critic's value of the state before each completion token."""

    def __init__(self, definition: DecoderDefinition, mesh: Mesh, *, dtype: jnp.dtype):
        def values(params: Params, rows: TokenBatch, temperature: Array) -> Array:
            del temperature
            return critic_values(definition.bind(params), rows, dtype=dtype, remat="none")

        super().__init__(values, mesh)


def append_dummy_token(sample: Sample) -> Sample:
    """Returns the sample followed by a dummy token, whose value is the value of the state after the sample."""
    mask = None if sample.loss_mask is None else np.append(sample.loss_mask, False)
    return replace(sample, completion_ids=np.append(sample.completion_ids, np.int32(0)), loss_mask=mask)


def reward_model_inputs(samples: Sequence[Sample], conversations: Sequence[Int32[np.ndarray, "T"]]) -> list[Sample]:
    """Returns the inputs of a reward model: each sample's conversation tokens, followed by a dummy token.

    A reward model is a sequence classifier with one label. Its value for the dummy token is the score, because it is
    read at the last token of the conversation. The common prefix of a prompt's conversations becomes the prompt, so
    that it is computed only once.
    """
    shared = _shared_lengths([sample.prompt.uid for sample in samples], conversations)
    inputs = []
    for sample, text in zip(samples, conversations, strict=True):
        length = shared[sample.prompt.uid]
        prompt = replace(sample.prompt, token_ids=text[:length])
        # The value of a token is read at the token before it.
        inputs.append(append_dummy_token(replace(sample, prompt=prompt, completion_ids=text[length:], loss_mask=None)))
    return inputs


def _shared_lengths(uids: Sequence[str], conversations: Sequence[np.ndarray]) -> Mapping[str, int]:
    """Returns, for each prompt uid, the number of first tokens that its conversations share, at least 1."""
    first: dict[str, np.ndarray] = {}
    shared: dict[str, int] = {}
    for uid, text in zip(uids, conversations, strict=True):
        other = first.setdefault(uid, text)[: shared.get(uid, len(text))]
        length = min(len(other), len(text))
        differs = np.flatnonzero(other[:length] != text[:length])
        shared[uid] = max(1, int(differs[0]) if len(differs) else length)
    return shared
