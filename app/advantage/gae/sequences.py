"""Rows of tokens as sequences that follow each other in one array, for the solvers on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int

from app.advantage.gae.recurrence import HostOrDevice, TokenAdvantages, values_after_rows

Ends = Int[np.ndarray, "S"]
"""Indices of the last tokens of sequences, in order."""


class Sequences(NamedTuple):
    """Sequences of N tokens that follow each other."""

    rewards: Float32[np.ndarray, "N"]
    values: Float32[np.ndarray, "N"]
    ends: Ends
    """The last of them is N - 1."""
    after: Float32[np.ndarray, "S"]
    """The value after each sequence."""
    output: TokenAdvantages
    """Receives advantages and returns, [N] each; zeros at first."""

    @classmethod
    def from_rows(
        cls, rewards: HostOrDevice, values: HostOrDevice, *, ends: HostOrDevice | None, bootstrap: HostOrDevice | None
    ) -> Sequences:
        """Returns the sequences of rows; arguments are those of `generalized_advantages`."""
        num_rows, num_tokens = rewards.shape
        last = np.arange(1, num_rows + 1) * num_tokens - 1
        after = np.asarray(values_after_rows(values, num_tokens, bootstrap), np.float32)
        if ends is not None and rewards.size:
            last, after = _add_ends(last, after, flatten(ends, bool), bootstrap)
        output = TokenAdvantages(*np.zeros((2, rewards.size), np.float32))
        return cls(flatten(rewards, np.float32), flatten(values[:, :num_tokens], np.float32), last, after, output)

    def cut(self, first: int, stop: int) -> tuple[Sequences, slice]:
        """Returns the sequences from `first` to before `stop`, and the place of their tokens."""
        start = int(self.ends[first - 1]) + 1 if first else 0
        place = slice(start, int(self.ends[stop - 1]) + 1)
        rewards, values, *output = (x[place] for x in (self.rewards, self.values, *self.output))
        return Sequences(
            rewards, values, self.ends[first:stop] - start, self.after[first:stop], TokenAdvantages(*output)
        ), place

    def without_skipped(self, kept: Bool[np.ndarray, "N"] | None) -> tuple[Ends, Float32[np.ndarray, "S"]]:
        """Returns `ends` and `after` of the sequences that remain of the tokens that are kept; None = all."""
        if kept is None:
            return self.ends, self.after
        starts = np.append(0, self.ends[:-1] + 1)
        counts = np.add.reduceat(kept.view(np.int8), starts, dtype=np.int32)
        return (np.cumsum(counts) - 1)[counts > 0], self.after[counts > 0]


@np.errstate(over="ignore", invalid="ignore")  # The caller looks at the results.
def solve_masked(
    tokens: Sequences, written: Bool[np.ndarray, "N"] | None, mask_mode: str,
    solve: Callable[[Sequences, Bool[np.ndarray, "N"] | None], None],
) -> None:  # fmt: skip
    """Solves sequences with the tokens outside `written` masked, whose results are 0 already.

    Args:
        solve: fills the output of the sequences, from the tokens that are kept; None = all.
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
    """Returns the numbers of all rows, one row after another."""
    return np.ascontiguousarray(x, dtype).reshape(-1)


def _add_ends(
    row_ends: Ends, after_rows: Float32[np.ndarray, "B"], is_end: Bool[np.ndarray, "N"], bootstrap: HostOrDevice | None
) -> tuple[Ends, Float32[np.ndarray, "S"]]:
    """Returns the ends of rows and of sequences in them, and the value after each."""
    is_end = is_end.copy()
    is_end[row_ends] = True
    last = np.flatnonzero(is_end)
    after = np.zeros(len(last), np.float32) if bootstrap is None else flatten(bootstrap, np.float32)[last]
    after[np.searchsorted(last, row_ends)] = after_rows
    return last, after


class Steps(NamedTuple):
    """The steps of the recurrence with discounts per token, in float64: the tokens that it does not skip."""

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
