"""Fused GAE: differences, scan, advantages and returns in one pass, by kernels on GPU and TPU, in blocks on the host.

On the host, for the plain case (no mask, no ends, one gamma and one lambda), each block of 65,536 tokens fits a core's
cache and is finished before the next is read. Each input and each output thus crosses main memory once. Within a block
the scan is the chunk scan of `app.advantage.gae.chunked` with one difference: the carry from the next chunk is computed
first and added to the input of the chunk's last step, so that one product with a small matrix gives the advantages.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Float64

from app.advantage.gae.recurrence import GaeOutput, HostOrDevice, RecurrenceTerms
from app.mesh.axis_rules import current_device

CHUNK_STEPS = 16
"""Steps per chunk."""
MAX_CHUNKS_PER_SEGMENT = 64
"""Largest number of chunks per segment."""
CACHE_BLOCK_TOKENS = 1 << 16
"""Tokens per block, from several rows if they are short: four arrays of this size fit into a core's cache."""


def solve_fused(terms: RecurrenceTerms) -> GaeOutput:
    """Solves the recurrence with the kernel for this GPU or TPU; needs a constant decay and at least one token."""
    # Pallas is slow to import and not needed on a CPU.
    from app.advantage.gae import pallas_kernel

    return pallas_kernel.KERNELS[current_device()[0]](terms)


def fused_gae_on_host(
    rewards: HostOrDevice, values: HostOrDevice, last_values: HostOrDevice, gamma: float, lam: float
) -> GaeOutput:
    """Computes GAE for rows of one sequence each, [B, T], in numpy and float32.

    Args:
        last_values: [B], the value after each row's last step.

    Source: Schulman et al. 2016, eq. 16.
    """
    rewards, values, last_values = (np.asarray(x, np.float32) for x in (rewards, values, last_values))
    output = GaeOutput(np.empty(rewards.shape, np.float32), np.empty(rewards.shape, np.float32))
    if rewards.size == 0:
        return output
    layout = _BlockLayout.for_row_length(rewards.shape[1])
    scan = _Scan.create(float(gamma), float(lam), layout)
    rows_at_once = max(1, CACHE_BLOCK_TOKENS // layout.num_steps)
    workspace = np.empty((rows_at_once, layout.num_steps), np.float32)
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
                workspace=workspace[: len(after)],
                out=GaeOutput(output.advantages[block], output.returns[block]),
            )
            after = values[rows, start]
    return output


class _BlockLayout(NamedTuple):
    """Nesting of a block's steps: a block has segments, a segment has chunks, a chunk has CHUNK_STEPS steps."""

    num_segments: int
    num_chunks: int
    """Number of chunks per segment."""

    @property
    def num_steps(self) -> int:
        return self.num_segments * self.num_chunks * CHUNK_STEPS

    @classmethod
    def for_row_length(cls, num_tokens: int) -> _BlockLayout:
        """Returns the layout of equal blocks that together hold a row of `num_tokens` with little padding."""
        num_blocks = -(-num_tokens // CACHE_BLOCK_TOKENS)
        chunks = -(-num_tokens // (num_blocks * CHUNK_STEPS))
        num_segments = -(-chunks // MAX_CHUNKS_PER_SEGMENT)
        return cls(num_segments, -(-chunks // num_segments))


class _Scan(NamedTuple):
    """Scan x_t -> sum over s >= t of decay^(s - t) x_s; each level has a matrix decay^(s - t), 0 for s < t."""

    layout: _BlockLayout
    one_minus_gamma: np.float32
    step_matrix: Float32[np.ndarray, "C C"]
    chunk_matrix: Float32[np.ndarray, "N N"]
    segment_matrix: Float64[np.ndarray, "S S"]
    decay: float
    """Decay over one step; the next two fields are the decay over one chunk and one segment."""
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
        """Solves one block of rows and returns the advantage of the first step of each row.

        Args:
            rewards: at most S N C steps; fewer only at the end of a row.
            values: values of the same steps.
            next_value: the value after the block.
            carry: the advantage after the block.
            workspace: buffer for a block that is not full.
            out: arrays that receive the results.
        """
        num_tokens = rewards.shape[1]
        # Until the end, the inputs use the memory of the returns: a smaller working set stays in the cache.
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
        """Adds the carry to the last input of each chunk, and returns the solution at the first step."""
        steps = inputs.reshape(len(inputs), *self.layout, CHUNK_STEPS, copy=False)
        chunks = np.matmul(steps, self.step_matrix[:, 0])
        segments = np.matmul(chunks, self.chunk_matrix[:, 0]).astype(np.float64)
        segments[:, -1] += self.segment_decay * carry
        segments = segments @ self.segment_matrix
        next_segments = np.concatenate([segments[:, 1:], carry[:, None]], axis=1)
        chunks[:, :, -1] += self.chunk_decay * next_segments
        solved = np.matmul(chunks, self.chunk_matrix)
        steps[:, :, :-1, -1] += self.decay * solved[:, :, 1:]
        steps[:, :, -1, -1] += self.decay * next_segments
        return segments[:, 0]

    def _apply_step_matrix(self, inputs: Float32[np.ndarray, "R S*N*C"], out: Float32[np.ndarray, "R T"]) -> None:
        """Writes the product of each chunk's inputs and the step matrix to `out`."""
        # Each product is too small for BLAS to use threads, whose synchronization would cost more than it saves.
        chunks = inputs.reshape(len(inputs), *self.layout, CHUNK_STEPS)
        if out.shape == inputs.shape:
            np.matmul(chunks, self.step_matrix, out=out.reshape(chunks.shape, copy=False))
        else:
            out[:] = np.matmul(chunks, self.step_matrix).reshape(inputs.shape)[:, : out.shape[1]]


def _decay_matrix(decay: float, size: int) -> tuple[Float64[np.ndarray, "C C"], float]:
    """Returns the scan matrix of `size` steps with this decay, and the decay over all of them."""
    # Only products, so that the powers of 0 and 1 are exact.
    powers = np.cumprod(np.concatenate([[1.0], np.full(size, decay)]))
    apart = np.arange(size)[:, None] - np.arange(size)
    return np.where(apart >= 0, powers[np.maximum(apart, 0)], 0.0), float(powers[size])


def _flush_subnormals(kernel: Float64[np.ndarray, "C C"]) -> Float32[np.ndarray, "C C"]:
    """Converts to float32 and sets subnormal numbers to 0, because processors are slow with them."""
    return np.where(kernel < np.finfo(np.float32).tiny, 0.0, kernel).astype(np.float32)
