"""Differences, scan, advantages and returns in one go: kernels on GPU and TPU, blocks of rows on the host.

On the host, for the plain case (no mask, no ends, one gamma and one lambda): a block of a few rows and of 2048 steps,
which fits a core's cache, is taken through everything before the one in front of it is read, so that main memory sees
each input and each output once. In a block the scan is the chunk scan of `app.advantage.gae.chunked` with two
differences. What a chunk hands on is found before the chunk is solved and is added to the input of its neighbour's last
step, so that one product of small matrices writes the advantages where they belong; each product is so small that BLAS
does not spread it over threads, which here costs more than it gives. And carries are float64, since blocks follow each
other.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32, Float64

from app.advantage.gae.chunked import chunked
from app.advantage.gae.terms import Credit, HostOrDevice, Terms

CHUNK = 32
BLOCK_STEPS = 2048
BLOCK_ROWS = 16
THREADED = 1 << 20
"""Numbers of an input from which on threads pay."""


class _Kernels(NamedTuple):
    """decay^(s - t) from step s back to step t, 0 where s < t: of steps of one chunk, and of chunks of one block."""

    steps: Float32[np.ndarray, "C C"]
    chunks: Float64[np.ndarray, "N N"]
    last_decay: float
    """Over one step: from a chunk's end to its last step."""
    chunk_decay: float
    """Over one chunk."""


def fused(terms: Terms, *, chunk_size: int) -> Credit:
    """The kernel of this device where it has one for these terms; else the chunk scan.

    There are kernels for GPU and TPU, and for one decay.
    """
    platform = jax.default_backend()
    if platform not in ("gpu", "tpu") or terms.decays.ndim > 0 or terms.rewards.size == 0:
        return chunked(terms, chunk_size=chunk_size)
    # Pallas is slow to import, and a CPU has no use for it.
    from app.advantage.gae import pallas_kernel

    return pallas_kernel.KERNELS[platform](terms)


def fused_plain(
    rewards: HostOrDevice, values: HostOrDevice, last_values: HostOrDevice, gamma: float, lam: float
) -> Credit:
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
    credit = Credit(np.empty(rewards.shape, np.float32), np.empty(rewards.shape, np.float32))
    if rewards.size == 0:
        return credit
    kernels = _kernels(float(gamma) * float(lam))

    def solve(start: int) -> None:
        rows = slice(start, start + BLOCK_ROWS)
        _solve_rows(
            rewards[rows],
            values[rows],
            last_values[rows],
            np.float32(gamma),
            kernels,
            Credit(credit.advantages[rows], credit.returns[rows]),
        )

    starts = range(0, len(rewards), BLOCK_ROWS)
    if rewards.size < THREADED or len(starts) == 1:
        for start in starts:
            solve(start)
    else:
        with ThreadPoolExecutor(min(len(starts), os.cpu_count() or 1)) as threads:
            list(threads.map(solve, starts))
    return credit


def _solve_rows(
    rewards: Float32[np.ndarray, "R T"],
    values: Float32[np.ndarray, "R T"],
    last_values: Float32[np.ndarray, "R"],
    gamma: np.float32,
    kernels: _Kernels,
    credit: Credit,
) -> None:
    """Fills in `credit`, block after block from the back."""
    num_rows, num_tokens = rewards.shape
    scratch = np.empty((num_rows, BLOCK_STEPS), np.float32)
    carry = np.zeros(num_rows)
    after = last_values
    for start in reversed(range(0, num_tokens, BLOCK_STEPS)):
        block = slice(start, start + BLOCK_STEPS)
        reward, value, advantages = rewards[:, block], values[:, block], credit.advantages[:, block]
        num_steps = reward.shape[1]
        num_chunks = -(-num_steps // CHUNK)
        inputs = scratch[:, : num_chunks * CHUNK]
        # Zeros behind the end hand nothing on.
        inputs[:, num_steps:] = 0
        deltas = inputs[:, :num_steps]
        np.multiply(value[:, 1:], gamma, out=deltas[:, :-1])
        np.multiply(after, gamma, out=deltas[:, -1])
        deltas += reward
        deltas -= value
        chunks = inputs.reshape(num_rows, num_chunks, CHUNK)
        carry = _hand_on(chunks, carry, kernels)
        if num_steps == num_chunks * CHUNK:
            np.matmul(chunks, kernels.steps, out=advantages.reshape(chunks.shape, copy=False))
        else:
            advantages[:] = np.matmul(chunks, kernels.steps).reshape(num_rows, -1)[:, :num_steps]
        np.add(advantages, value, out=credit.returns[:, block])
        after = value[:, 0]


def _hand_on(
    chunks: Float32[np.ndarray, "R chunks C"], carry: Float64[np.ndarray, "R"], kernels: _Kernels
) -> Float64[np.ndarray, "R"]:
    """Adds to each chunk's last input what comes from behind the chunk; the advantage of the first step of all."""
    num_chunks = chunks.shape[1]
    own = np.matmul(chunks, kernels.steps[:, 0]).astype(np.float64)
    own[:, -1] += kernels.chunk_decay * carry
    advantages = own @ kernels.chunks[:num_chunks, :num_chunks]
    chunks[:, -1, -1] += kernels.last_decay * carry
    chunks[:, :-1, -1] += kernels.last_decay * advantages[:, 1:]
    return advantages[:, 0]


def _kernels(decay: float) -> _Kernels:
    def kernel(decay: float, size: int) -> tuple[Float64[np.ndarray, "C C"], float]:
        # Products alone, so that 0 and 1 are exact.
        powers = np.cumprod(np.concatenate([[1.0], np.full(size, decay)]))
        apart = np.arange(size)[:, None] - np.arange(size)
        return np.where(apart >= 0, powers[np.maximum(apart, 0)], 0.0), float(powers[size])

    steps, chunk_decay = kernel(decay, CHUNK)
    # What float32 cannot hold at full precision is 0: the processor is slow with such numbers.
    steps = np.where(steps < np.finfo(np.float32).tiny, 0.0, steps).astype(np.float32)
    return _Kernels(steps, kernel(chunk_decay, BLOCK_STEPS // CHUNK)[0], decay, chunk_decay)
