"""Computes GAE in numpy on the host, one block of tokens at a time.

Rows are concatenated into one array, without the tokens that the recurrence skips, and divided among threads.
Blocks are solved from the last to the first, so that inputs and outputs cross main memory once. The scan has chunks of
`CHUNK_STEPS` steps: it computes the first step of each chunk by a matmul with one column of decays; the carries between
chunks by the same scan with one step per chunk; and all steps by one matmul with a matrix of decays. Chunks in which
one sequence ends and another begins are solved together, step by step.

If discounts vary by token, there is no such matrix: `solve_variable_decay` solves all chunks at once, step by step, in
float64.

Source: the chunked form of linear attention, applied to GAE in THUDM/slime.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Float64, Int

from app.advantage.gae.recurrence import HostOrDevice, Number, TokenAdvantages, values_after_rows

CHUNK_STEPS = 16
STACKED_CHUNKS = 64
"""Chunks per matmul: few enough that BLAS uses one thread. Its threads stall when other processes use the cores."""
FEW_STEPS = 512
"""Largest number of steps solved by a Python loop; must be at least `STACKED_CHUNKS`, the chunks of one matmul."""
THREAD_TOKENS = 1 << 19
"""Minimum number of tokens per thread."""
BLOCK_TOKENS = 1 << 18
"""Tokens per block: four arrays of this size fit into the shared cache."""


Ends = Int[np.ndarray, "S"]
"""Index of each sequence's last token, in ascending order."""


class Sequences(NamedTuple):
    """Consecutive sequences with N tokens in total."""

    rewards: Float32[np.ndarray, "N"]
    values: Float32[np.ndarray, "N"]
    ends: Ends
    """Index of each sequence's last token; the last index is N - 1."""
    after: Float32[np.ndarray, "S"]
    """The value after each sequence."""
    output: TokenAdvantages
    """Receives advantages and returns, [N] each; initially zeros."""

    @classmethod
    def from_rows(
        cls, rewards: HostOrDevice, values: HostOrDevice, *, ends: HostOrDevice | None, bootstrap: HostOrDevice | None
    ) -> Sequences:
        """Returns the sequences of rows; for the arguments see `generalized_advantages`."""
        num_rows, num_tokens = rewards.shape
        last = np.arange(1, num_rows + 1) * num_tokens - 1
        after = np.asarray(values_after_rows(values, num_tokens, bootstrap), np.float32)
        if ends is not None and rewards.size:
            is_end = flatten(ends, bool).copy()
            is_end[last] = True
            row_ends, after_rows, last = last, after, np.flatnonzero(is_end)
            after = np.zeros(len(last), np.float32) if bootstrap is None else flatten(bootstrap, np.float32)[last]
            after[np.searchsorted(last, row_ends)] = after_rows
        output = TokenAdvantages(*np.zeros((2, rewards.size), np.float32))
        return cls(flatten(rewards, np.float32), flatten(values[:, :num_tokens], np.float32), last, after, output)

    def cut(self, first: int, stop: int) -> tuple[Sequences, slice]:
        """Returns the sequences `first` to `stop` (exclusive), and the slice of their tokens."""
        start = int(self.ends[first - 1]) + 1 if first else 0
        place = slice(start, int(self.ends[stop - 1]) + 1)
        rewards, values, *output = (x[place] for x in (self.rewards, self.values, *self.output))
        return Sequences(
            rewards, values, self.ends[first:stop] - start, self.after[first:stop], TokenAdvantages(*output)
        ), place

    def without_skipped(self, kept: Bool[np.ndarray, "N"] | None) -> tuple[Ends, Float32[np.ndarray, "S"]]:
        """Returns `ends` (as indices of kept tokens) and `after` of the sequences with kept tokens; None keeps all."""
        if kept is None:
            return self.ends, self.after
        starts = np.append(0, self.ends[:-1] + 1)
        counts = np.add.reduceat(kept.view(np.int8), starts, dtype=np.int32)
        return (np.cumsum(counts) - 1)[counts > 0], self.after[counts > 0]


@np.errstate(over="ignore", invalid="ignore")  # The caller checks the results.
def _solve_masked(
    tokens: Sequences, written: Bool[np.ndarray, "N"] | None, mask_mode: str, solve: Callable[..., None]
) -> None:
    """Solves the recurrence of sequences with masked tokens in a mask mode; the results of masked tokens are 0.

    Args:
        written: whether each token counts; the others are masked. None masks no token.
        solve: takes sequences and which tokens to solve (None = all), and fills the output of the sequences.
    """
    if written is None or mask_mode == "skip":
        solve(tokens, written)
        return
    if mask_mode == "zero":
        rewards, values = (np.where(written, x, np.float32(0)) for x in (tokens.rewards, tokens.values))
        tokens = tokens._replace(rewards=rewards, values=values)
    solve(tokens, None)
    for x in tokens.output:
        np.copyto(x, 0, where=~written)


def flatten(x: HostOrDevice, dtype: type) -> np.ndarray:
    """Returns the rows concatenated into one contiguous array of this dtype."""
    return np.ascontiguousarray(x, dtype).reshape(-1)


class Steps(NamedTuple):
    """The steps of the recurrence (all tokens that are not skipped) with discounts per token, in float64."""

    deltas: Float64[np.ndarray, "n"]
    """r_t + gamma_t V_{t+1} - V_t."""
    values: Float64[np.ndarray, "n"]
    decays: Float64[np.ndarray, "n"]
    """gamma_t lambda_t; 0 at the end of a sequence."""

    @classmethod
    def from_tokens(
        cls,
        tokens: Sequences,
        kept: Bool[np.ndarray, "N"] | None,
        gammas: Float64[np.ndarray, "N"],
        lams: Float64[np.ndarray, "N"],
    ) -> Steps:
        ends, after = tokens.without_skipped(kept)
        place = slice(None) if kept is None else kept
        rewards, values = tokens.rewards[place].astype(np.float64), tokens.values[place].astype(np.float64)
        next_values = np.append(values[1:], 0.0)[: len(values)]
        next_values[ends] = after
        decays = gammas[place] * lams[place]
        decays[ends] = 0.0
        return cls(rewards + gammas[place] * next_values - values, values, decays)


class _Level(NamedTuple):
    decay: float
    matrix: Float[np.ndarray, "C C"]
    """decay^(s - t) for steps s and t of a chunk, 0 for s < t."""
    first_column: Float[np.ndarray, "C"]


def solve_in_numpy(
    rewards: HostOrDevice,
    values: HostOrDevice,
    *,
    gamma: Number,
    lam: Number,
    mask: HostOrDevice | None,
    ends: HostOrDevice | None,
    bootstrap: HostOrDevice | None,
    mask_mode: str,
) -> TokenAdvantages:
    """Computes GAE in float32; for the arguments see `app.advantage.gae.estimate.generalized_advantages`.

    Source: Schulman et al. 2016, eq. 16.
    """
    sequences = Sequences.from_rows(rewards, values, ends=ends, bootstrap=bootstrap)
    output = TokenAdvantages(*(x.reshape(rewards.shape) for x in sequences.output))
    if rewards.size == 0:
        return output
    written = None if mask is None else flatten(mask, bool)
    if np.ndim(gamma) or np.ndim(lam):
        gammas, lams = (np.broadcast_to(x, rewards.shape).reshape(-1).astype(np.float64) for x in (gamma, lam))
        _solve_masked(sequences, written, mask_mode, partial(_solve_discounts_per_token, gammas=gammas, lams=lams))
        return output
    solve = partial(_solve_sequences, gamma=float(gamma), lam=float(lam))

    def solve_part(first: int, stop: int) -> None:
        part, place = sequences.cut(first, stop)
        _solve_masked(part, None if written is None else written[place], mask_mode, solve)

    num_parts = min(os.cpu_count() or 1, 1 + rewards.size // THREAD_TOKENS)
    cuts = np.unique(np.searchsorted(sequences.ends, np.linspace(0, rewards.size, num_parts + 1), side="left"))
    if len(cuts) == 2:
        solve_part(0, len(sequences.ends))
    else:
        with ThreadPoolExecutor(len(cuts) - 1) as pool:  # numpy releases the GIL while it computes.
            list(pool.map(solve_part, cuts[:-1], cuts[1:]))
    return output


def _solve_sequences(tokens: Sequences, kept: Bool[np.ndarray, "N"] | None, *, gamma: float, lam: float) -> None:
    """Computes the GAE of sequences as if they contained only the kept tokens; None keeps all."""
    ends, after = tokens.without_skipped(kept)
    num_kept = int(ends[-1]) + 1 if len(ends) else 0
    workspace = np.empty(_pad_to_whole_matmuls(min(num_kept, BLOCK_TOKENS)), np.float32)
    levels = _make_levels(gamma * lam, min(num_kept, BLOCK_TOKENS))
    one_minus_gamma = np.float32(1 - gamma)
    carry, next_value, first_kept = 0.0, np.float32(0), num_kept
    for start in reversed(range(0, len(tokens.values), BLOCK_TOKENS)):
        block = slice(start, start + BLOCK_TOKENS)
        rewards, own, advantages, returns = (x[block] for x in (tokens.rewards, tokens.values, *tokens.output))
        is_kept = None if kept is None or kept[block].all() else kept[block]
        if is_kept is not None:
            rewards, own = rewards[is_kept], own[is_kept]
            advantages, returns = np.empty_like(own), own
        if not len(own):
            continue
        stop_kept, first_kept = first_kept, first_kept - len(own)
        first, stop = np.searchsorted(ends, (first_kept, stop_kept))
        last, behind = ends[first:stop] - first_kept, after[first:stop]
        inputs = workspace[: _pad_to_whole_matmuls(len(own))]
        inputs[len(own) :] = 0
        deltas, shrunk = inputs[: len(own)], advantages
        np.subtract(own[1:], own[:-1], out=deltas[:-1])
        deltas[-1] = next_value - own[-1]
        deltas[last] = behind - own[last]
        if one_minus_gamma:
            np.multiply(own[1:], one_minus_gamma, out=shrunk[:-1])
            shrunk[-1] = next_value * one_minus_gamma
            shrunk[last] = behind * one_minus_gamma
            deltas -= shrunk
        deltas += rewards
        if not len(last) or last[-1] < len(own) - 1:
            deltas[-1] += gamma * lam * carry
        carry = _scan(inputs, levels, last, out=advantages)
        next_value = own[0]
        np.add(advantages, own, out=returns)
        if is_kept is not None:
            for part, whole in zip((advantages, returns), tokens.output, strict=True):
                whole[block][is_kept] = part


def _scan(
    inputs: Float[np.ndarray, "N"], levels: Sequence[_Level], ends: Ends, *, out: Float[np.ndarray, "n"]
) -> float:
    """Solves A_t = inputs_t + decay A_{t+1}, where the second term is 0 at ends, and returns A_0.

    Args:
        inputs: padded to whole matmuls, see `_pad_to_whole_matmuls`; overwritten.
        levels: the first is for this scan, the others for its carries.
        out: receives the first n of the N solutions.
    """
    decay, matrix, first_column = levels[0]
    if out.size <= FEW_STEPS:
        out[:] = _solve_few(inputs[: out.size].tolist(), decay, ends.tolist())
        return float(out[0])
    stack = inputs.reshape(-1, STACKED_CHUNKS, CHUNK_STEPS, copy=False)
    chunks = inputs.reshape(-1, CHUNK_STEPS, copy=False)
    cut, step = np.divmod(ends, CHUNK_STEPS)
    is_inside = step < CHUNK_STEPS - 1
    mixed, step = cut[is_inside], step[is_inside]
    if len(mixed):
        is_end = np.zeros((len(chunks), CHUNK_STEPS), bool)
        is_end[mixed, step] = True
        mixed = _distinct(mixed)
        is_end = is_end[mixed]
    # float64: higher levels have few numbers, but their errors spread over many steps.
    firsts = np.zeros(_pad_to_whole_matmuls(len(chunks)))
    solved = np.empty(len(chunks))
    firsts[: len(chunks)] = np.matmul(stack, first_column).reshape(-1)
    if len(mixed):
        alone = _solve_steps(chunks[mixed], decay, is_end)
        firsts[mixed] = alone[:, 0]
    _scan(firsts, levels[1:], _distinct(cut), out=solved)
    carries = decay * solved[1:]
    carries[cut[~is_inside & (cut < len(carries))]] = 0
    chunks[:-1, -1] += carries
    if out.size == inputs.size:
        np.matmul(stack, matrix, out=out.reshape(stack.shape, copy=False))
    else:
        out[:] = np.matmul(stack, matrix).reshape(-1)[: out.size]
    if len(mixed):
        at = (mixed[:, None] * CHUNK_STEPS + np.arange(CHUNK_STEPS)).reshape(-1)
        ends_later = np.logical_or.accumulate(is_end[:, ::-1], axis=1)[:, ::-1]
        carried = np.append(carries, 0.0)[mixed, None] * matrix[-1]
        out[at[at < out.size]] = (alone + np.where(ends_later, 0.0, carried)).reshape(-1)[at < out.size]
    return float(solved[0])


def _pad_to_whole_matmuls(num_steps: int) -> int:
    """Returns `num_steps` rounded up to a multiple of the steps in one matmul."""
    return num_steps + -num_steps % (STACKED_CHUNKS * CHUNK_STEPS)


def _solve_few(inputs: list[float], decay: float, ends: list[int]) -> list[float]:
    """Solves the recurrence in a Python loop, which is faster than numpy for few steps."""
    is_end = set(ends)
    advantage = 0.0
    for t in reversed(range(len(inputs))):
        # 0 x NaN is NaN: a NaN in one sequence would spread to all earlier ones.
        inputs[t] = advantage = inputs[t] if t in is_end else inputs[t] + decay * advantage
    return inputs


def _solve_steps(
    inputs: Float[np.ndarray, "M C"], decay: float, is_end: Bool[np.ndarray, "M C"]
) -> Float64[np.ndarray, "M C"]:
    """Solves A_t = inputs_t + decay A_{t+1}, where the second term is 0 at ends, step by step."""
    solved = np.empty(inputs.shape)
    advantage = np.zeros(len(inputs))
    for step in reversed(range(inputs.shape[1])):
        advantage = inputs[:, step] + np.where(is_end[:, step], 0.0, decay * advantage)
        solved[:, step] = advantage
    return solved


def _distinct(numbers: Int[np.ndarray, "n"]) -> Int[np.ndarray, "m"]:
    """Removes duplicates from sorted numbers."""
    return numbers[np.append(numbers[1:] != numbers[:-1], True)] if len(numbers) else numbers


def _make_levels(decay: float, num_tokens: int) -> list[_Level]:
    """Returns the levels of a scan: the first in float32, the others, for carries, in float64."""
    levels, dtype = [], np.float32
    while True:
        # Only products, so that the powers of 0 and 1 are exact.
        powers = np.cumprod(np.concatenate([[1.0], np.full(CHUNK_STEPS, decay)]))
        apart = np.arange(CHUNK_STEPS)[:, None] - np.arange(CHUNK_STEPS)
        matrix = np.where(apart >= 0, powers[np.maximum(apart, 0)], 0.0)
        # Processors are slow with subnormal numbers.
        matrix = np.where(matrix < np.finfo(dtype).tiny, 0.0, matrix).astype(dtype)
        levels.append(_Level(decay, matrix, np.ascontiguousarray(matrix[:, 0])))
        if num_tokens <= FEW_STEPS:
            return levels
        decay, dtype, num_tokens = float(powers[-1]), np.float64, _pad_to_whole_matmuls(num_tokens) // CHUNK_STEPS


def _solve_discounts_per_token(
    tokens: Sequences, kept: Bool[np.ndarray, "N"] | None, *, gammas: np.ndarray, lams: np.ndarray
) -> None:
    steps = Steps.from_tokens(tokens, kept, gammas, lams)
    advantages = solve_variable_decay(steps.deltas, steps.decays)
    place = slice(None) if kept is None else kept
    tokens.output.advantages[place], tokens.output.returns[place] = advantages, advantages + steps.values


def solve_variable_decay(
    inputs: Float64[np.ndarray, "n"], decays: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Solves A_t = inputs_t + decay_t A_{t+1} in about sqrt(n) chunks, vectorized over the chunks.

    The advantage at step t of a chunk is a local part plus the carry (the first advantage of the next chunk) times the
    product of the decays from t to the end of the chunk.
    """
    size = max(1, math.isqrt(len(inputs)))
    num_chunks = -(-len(inputs) // size)

    def by_step(x: np.ndarray) -> np.ndarray:
        return np.pad(x, (0, size * num_chunks - len(x))).reshape(num_chunks, size).T.copy()

    own, products = by_step(inputs), by_step(decays)
    for t in reversed(range(size - 1)):
        own[t] += products[t] * own[t + 1]
        products[t] *= products[t + 1]
    carries, carry = np.zeros(num_chunks), 0.0
    for chunk, (first, product) in reversed([*enumerate(zip(own[0].tolist(), products[0].tolist(), strict=True))]):
        carries[chunk] = carry
        carry = first + product * carry
    own += products * carries
    return own.T.reshape(-1)[: len(inputs)]
