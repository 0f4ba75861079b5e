"""Differences, scan, advantages and returns in one go: kernels on GPU and TPU, blocks of rows on the host.

On the host, for the plain case (no mask, no ends, one gamma and one lambda), a block of 65,536 tokens, which fits a
core's cache, is taken through everything before the next is read, so that main memory sees each input and each output
once. In a block the scan is the chunk scan of `app.advantage.gae.chunked` with one difference: what a chunk gets from
the next one is found before the chunk is solved and is added to the input of its last step, so that one product with a
small matrix writes the advantages where they belong.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Float64

from app.advantage.gae.recurrence import GaeOutput, HostOrDevice, RecurrenceTerms

CHUNK_STEPS = 16
"""Steps."""
MAX_CHUNKS_PER_SEGMENT = 64
"""Chunks, at most."""
CACHE_BLOCK_TOKENS = 1 << 16
"""Tokens, of several rows where they are short: four arrays of it fit a core's cache. Larger ones were no faster."""


def solve_fused(terms: RecurrenceTerms) -> GaeOutput:
    """The kernel of this device, which is a GPU or a TPU, for terms with one leak and at least one token."""
    # Pallas is slow to import, and a CPU has no use for it.
    from app.advantage.gae import pallas_kernel

    return pallas_kernel.KERNELS[jax.default_backend()](terms)


def fused_gae_on_host(
    rewards: HostOrDevice, values: HostOrDevice, last_values: HostOrDevice, gamma: float, lam: float
) -> GaeOutput:
    """GAE of rows that are one sequence each; numpy arrays, float32 inside and out.

    Args:
        rewards: [B, T].
        values: [B, T].
        last_values: [B], the value after each row's last step.
        gamma: in [0, 1].
        lam: in [0, 1].

    Source: Schulman et al. 2016, eq. 16.
    """
    rewards, values, last_values = (np.asarray(x, np.float32) for x in (rewards, values, last_values))
    credit = GaeOutput(np.empty(rewards.shape, np.float32), np.empty(rewards.shape, np.float32))
    if rewards.size == 0:
        return credit
    layout = _BlockLayout.for_row_length(rewards.shape[1])
    scan = _Scan.create(float(gamma), float(lam), layout)
    rows_at_once = max(1, CACHE_BLOCK_TOKENS // layout.num_steps)
    room = np.empty((rows_at_once, layout.num_steps), np.float32)
    for first_row in range(0, len(rewards), rows_at_once):
        rows = slice(first_row, first_row + rows_at_once)
        after = last_values[rows]
        carry = np.zeros(len(after))
        for start in reversed(range(0, rewards.shape[1], layout.num_steps)):
            block = rows, slice(start, start + layout.num_steps)
            carry = scan.solve(
                rewards[block],
                values[block],
                after,
                carry,
                workspace=room[: len(after)],
                out=GaeOutput(credit.advantages[block], credit.returns[block]),
            )
            after = values[rows, start]
    return credit


class _BlockLayout(NamedTuple):
    """How a block's steps are nested: segments of chunks of CHUNK steps."""

    num_segments: int
    num_chunks: int
    """Of a segment."""

    @property
    def num_steps(self) -> int:
        return self.num_segments * self.num_chunks * CHUNK_STEPS

    @classmethod
    def for_row_length(cls, num_tokens: int) -> _BlockLayout:
        """Of equal blocks that hold a row of `num_tokens` with little to spare."""
        num_blocks = -(-num_tokens // CACHE_BLOCK_TOKENS)
        chunks = -(-num_tokens // (num_blocks * CHUNK_STEPS))
        num_segments = -(-chunks // MAX_CHUNKS_PER_SEGMENT)
        return cls(num_segments, -(-chunks // num_segments))


class _Scan(NamedTuple):
    """x_t -> sum over s >= t of decay^(s - t) x_s; of each level the matrix [s, t] = decay^(s - t), 0 where s < t."""

    layout: _BlockLayout
    one_minus_gamma: np.float32
    """1 - gamma."""
    step_matrix: Float32[np.ndarray, "C C"]
    chunk_matrix: Float32[np.ndarray, "N N"]
    segment_matrix: Float64[np.ndarray, "S S"]
    decay: float
    """Over one step, one chunk, one segment."""
    chunk_decay: float
    segment_decay: float

    @classmethod
    def create(cls, gamma: float, lam: float, layout: _BlockLayout) -> _Scan:
        decay = gamma * lam
        steps, chunk_decay = _decay_matrix(decay, CHUNK_STEPS)
        chunks, segment_decay = _decay_matrix(chunk_decay, layout.num_chunks)
        segments, _ = _decay_matrix(segment_decay, layout.num_segments)
        return cls(
            layout,
            np.float32(1 - gamma),
            _flush_subnormals(steps),
            _flush_subnormals(chunks),
            segments,
            decay,
            chunk_decay,
            segment_decay,
        )

    def solve(
        self,
        rewards: Float32[np.ndarray, "R T"],
        values: Float32[np.ndarray, "R T"],
        next_value: Float32[np.ndarray, "R"],
        carry: Float64[np.ndarray, "R"],
        *,
        workspace: Float32[np.ndarray, "R S*N*C"],
        out: GaeOutput,
    ) -> Float64[np.ndarray, "R"]:
        """One block of rows; the advantages of its first steps.

        Args:
            rewards: of at most S N C steps; fewer only at the end of a row.
            values: likewise.
            after: the value behind the block.
            carry: the advantage behind the block.
            room: to work in where the block is not full.
            into: where the results belong.
        """
        num_tokens = rewards.shape[1]
        # Less memory at a time is more of it in the cache: until the end the inputs stand where the returns will.
        inputs = out.returns if workspace.shape == rewards.shape else workspace
        inputs[:, num_tokens:] = 0
        deltas, shrunk = inputs[:, :num_tokens], out.advantages
        np.subtract(values[:, 1:], values[:, :-1], out=deltas[:, :-1])
        np.subtract(next_value, values[:, -1], out=deltas[:, -1])
        if self.one_minus_gamma:
            np.multiply(values[:, 1:], self.one_minus_gamma, out=shrunk[:, :-1])
            np.multiply(next_value, self.one_minus_gamma, out=shrunk[:, -1])
            deltas -= shrunk
        deltas += rewards
        carry = self._propagate_carry(inputs, carry)
        self._apply_step_matrix(inputs, out.advantages)
        np.add(out.advantages, values, out=out.returns)
        return carry

    def _propagate_carry(
        self, inputs: Float32[np.ndarray, "R S*N*C"], carry: Float64[np.ndarray, "R"]
    ) -> Float64[np.ndarray, "R"]:
        """Adds to each chunk's last input what comes from behind the chunk; the solution at the first step."""
        steps = inputs.reshape(len(inputs), *self.layout, CHUNK_STEPS, copy=False)
        chunks = np.matmul(steps, self.step_matrix[:, 0])
        segments = np.matmul(chunks, self.chunk_matrix[:, 0]).astype(np.float64)
        segments[:, -1] += self.segment_decay * carry
        segments = segments @ self.segment_matrix
        behind_segments = np.concatenate([segments[:, 1:], carry[:, None]], axis=1)
        chunks[:, :, -1] += self.chunk_decay * behind_segments
        solved = np.matmul(chunks, self.chunk_matrix)
        steps[:, :, :-1, -1] += self.decay * solved[:, :, 1:]
        steps[:, :, -1, -1] += self.decay * behind_segments
        return segments[:, 0]

    def _apply_step_matrix(self, inputs: Float32[np.ndarray, "R S*N*C"], out: Float32[np.ndarray, "R T"]) -> None:
        """Fills `into` with each chunk's inputs times the matrix."""
        # A stack of products, each so small that BLAS does not spread it over threads: waiting for them costs more.
        chunks = inputs.reshape(len(inputs), *self.layout, CHUNK_STEPS)
        if out.shape == inputs.shape:
            np.matmul(chunks, self.step_matrix, out=out.reshape(chunks.shape, copy=False))
        else:
            out[:] = np.matmul(chunks, self.step_matrix).reshape(inputs.shape)[:, : out.shape[1]]


def _decay_matrix(decay: float, size: int) -> tuple[Float64[np.ndarray, "C C"], float]:
    """The matrix of `size` steps with this decay, and the decay over all of them."""
    # Products alone, so that 0 and 1 are exact.
    powers = np.cumprod(np.concatenate([[1.0], np.full(size, decay)]))
    apart = np.arange(size)[:, None] - np.arange(size)
    return np.where(apart >= 0, powers[np.maximum(apart, 0)], 0.0), float(powers[size])


def _flush_subnormals(kernel: Float64[np.ndarray, "C C"]) -> Float32[np.ndarray, "C C"]:
    """Without what float32 cannot hold at full precision: the processor is slow with such numbers."""
    return np.where(kernel < np.finfo(np.float32).tiny, 0.0, kernel).astype(np.float32)
