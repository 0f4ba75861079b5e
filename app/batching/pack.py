"""Samples <-> rows of static shape. The only place in the program that pads.

A row holds any number of segments one after another; segment ids keep them apart. A segment is a prompt with one
completion or, where a prompt is shared, several behind it; branch ids keep those apart. Whatever a sample carries per
completion token is laid out the same way, [R, C], beside the targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64

from app.batching.micro_batch_plan import MicroBatch, Plan, RowShape
from app.records.sample import Sample

HostOrDevice = Any
"""numpy while it is packed, `jax.Array` once it is placed."""

NO_TARGET = -1
"""`score_index` of padding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of packed rows: what a forward pass reads. numpy on the host, global arrays on devices."""

    token_ids: Int32[HostOrDevice, "R T"]
    positions: Int32[HostOrDevice, "R T"]
    """Within the segment: 0 .. S-1 on its prompt; every completion goes on from S."""
    segment_ids: Int32[HostOrDevice, "R T"]
    """1, 2, ... per segment of a row; 0 is padding."""
    branch_ids: Int32[HostOrDevice, "R T"]
    """1, 2, ... per completion behind a shared prompt; 0 on prompts and wherever nothing is shared."""
    score_index: Int32[HostOrDevice, "R C"]
    """Where in the row the hidden state stands that predicts each target: the token before it, for the first of a
    completion the last of its prompt. -1 where there is no target."""
    targets: Int32[HostOrDevice, "R C"]
    mask: Bool[HostOrDevice, "R C"]
    """True on completion tokens that the policy wrote."""


def pack_tokens(samples: Sequence[Sample], micro_batch: MicroBatch) -> TokenBatch:
    """Lays prompts and completions out in rows. Padding has segment 0, no score index and a False mask.

    Raises:
        ValueError: a row is too short for its samples.
    """
    at = _Layout.of(samples, micro_batch)
    shape = (len(micro_batch.rows), micro_batch.shape.num_tokens)
    prompts, completions = _spread(at.prompt_starts, at.prompt_lengths), _spread(at.starts, at.lengths)

    def rows(of_prompts: Iterable[np.ndarray], of_completions: Iterable[np.ndarray]) -> np.ndarray:
        laid_out = np.zeros(shape, np.int32)
        laid_out.reshape(-1)[prompts] = _joined(of_prompts, np.int32)
        laid_out.reshape(-1)[completions] = _joined(of_completions, np.int32)
        return laid_out

    of_completion = at.segment_of_completion
    zeros = np.zeros_like(at.prompt_lengths)
    numbers = at.segment_numbers
    # The first token of a completion is predicted where its prompt ends, wherever in the row the completion stands.
    places = completions - 1
    written = at.lengths > 0
    places[_before(at.lengths)[written]] = (at.prompt_starts + at.prompt_lengths - 1)[of_completion][written]
    return TokenBatch(
        token_ids=rows(
            [samples[i].prompt.token_ids for i in at.prompt_owners], [samples[i].completion_ids for i in at.members]
        ),
        positions=rows([_spread(zeros, at.prompt_lengths)], [_spread(at.prompt_lengths[of_completion], at.lengths)]),
        segment_ids=rows([np.repeat(numbers, at.prompt_lengths)], [np.repeat(numbers[of_completion], at.lengths)]),
        branch_ids=rows([np.zeros(len(prompts), np.int32)], [np.repeat(at.branches, at.lengths)]),
        score_index=at.beside_targets([places % shape[1]], np.int32, padding=NO_TARGET),
        targets=at.beside_targets([samples[i].completion_ids for i in at.members], np.int32),
        mask=at.beside_targets([samples[i].mask for i in at.members], np.bool_),
    )


def pack_per_token(
    samples: Sequence[Sample], micro_batch: MicroBatch, value_of: Callable[[Sample], np.ndarray]
) -> Float32[np.ndarray, "R C"]:
    """Lays a per-completion-token quantity out beside the targets; 0 on padding."""
    at = _Layout.of(samples, micro_batch)
    return at.beside_targets([value_of(samples[i]) for i in at.members], np.float32)


def pack_last_targets(samples: Sequence[Sample], micro_batch: MicroBatch) -> Int32[np.ndarray, "R C"]:
    """Beside each target, where in its row the last one of the same sample stands; -1 on padding."""
    at = _Layout.of(samples, micro_batch)
    last = (at.target_starts + at.lengths - 1) % at.shape[1]
    return at.beside_targets([np.repeat(last, at.lengths)], np.int32, padding=NO_TARGET)


def unpack_per_token(
    packed: Sequence[Float32[np.ndarray, "R C"]], samples: Sequence[Sample], plan: Plan
) -> list[Float32[np.ndarray, "C"]]:
    """The inverse of `pack_per_token`: one array per sample, in sample order, padding gone."""
    values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
    for rows, micro_batch in zip(packed, plan.micro_batches, strict=True):
        at = _Layout.of(samples, micro_batch)
        flat = rows.reshape(-1)
        for i, first, length in zip(at.members, at.target_starts.tolist(), at.lengths.tolist(), strict=True):
            values[i] = flat[first : first + length]
    return values


class _Layout(NamedTuple):
    """Where the pieces of a micro-batch stand. Starts count over the flattened [R, T], or [R, C] for targets."""

    shape: tuple[int, int]
    """[R, C]."""
    prompt_owners: list[int]
    """Of each segment: the sample that brings its prompt."""
    prompt_starts: Int64[np.ndarray, "segments"]
    prompt_lengths: Int64[np.ndarray, "segments"]
    segment_numbers: Int64[np.ndarray, "segments"]
    """1, 2, ... within the row."""
    members: list[int]
    """Of each completion: its sample."""
    segment_of_completion: Int64[np.ndarray, "completions"]
    branches: Int64[np.ndarray, "completions"]
    starts: Int64[np.ndarray, "completions"]
    lengths: Int64[np.ndarray, "completions"]
    target_starts: Int64[np.ndarray, "completions"]

    @classmethod
    def of(cls, samples: Sequence[Sample], micro_batch: MicroBatch) -> _Layout:
        segments = [segment for row in micro_batch.rows for segment in row]
        row = np.repeat(np.arange(len(micro_batch.rows)), [len(row) for row in micro_batch.rows])
        sizes = np.asarray([len(segment) for segment in segments], np.int64)
        owners = [segment[0] for segment in segments]
        members = [i for segment in segments for i in segment]
        prompts = np.asarray([len(samples[i].prompt.token_ids) for i in owners], np.int64)
        lengths = np.asarray([len(samples[i].completion_ids) for i in members], np.int64)
        of_completion = np.repeat(np.arange(len(segments)), sizes)
        behind = np.bincount(of_completion, lengths, len(segments)).astype(np.int64)
        _check(row, prompts + behind, behind, micro_batch.shape)
        starts = row * micro_batch.shape.num_tokens + _within(prompts + behind, row)
        ordinals = _within(np.ones_like(lengths), of_completion) + 1
        return cls(
            shape=(len(micro_batch.rows), micro_batch.shape.num_completion_tokens),
            prompt_owners=owners,
            prompt_starts=starts,
            prompt_lengths=prompts,
            segment_numbers=_within(np.ones_like(row), row) + 1,
            members=members,
            segment_of_completion=of_completion,
            branches=np.where(sizes[of_completion] > 1, ordinals, 0),
            starts=(starts + prompts)[of_completion] + _within(lengths, of_completion),
            lengths=lengths,
            target_starts=row[of_completion] * micro_batch.shape.num_completion_tokens
            + _within(lengths, row[of_completion]),
        )

    def beside_targets(self, values: Iterable[np.ndarray], dtype: type, padding: float = 0) -> np.ndarray:
        """[R, C]: values of all completions, one after another, each at its target."""
        laid_out = np.full(self.shape, padding, dtype)
        laid_out.reshape(-1)[_spread(self.target_starts, self.lengths)] = _joined(values, dtype)
        return laid_out


def _check(row: np.ndarray, tokens: np.ndarray, targets: np.ndarray, shape: RowShape) -> None:
    for what, lengths, limit in (
        ("tokens", tokens, shape.num_tokens),
        ("completion tokens", targets, shape.num_completion_tokens),
    ):
        longest = int(np.bincount(row, lengths).max(initial=0))
        if longest > limit:
            raise ValueError(f"a row of {limit} {what} cannot hold samples of {longest}")


def _before(lengths: np.ndarray) -> np.ndarray:
    """Sum of all lengths before each."""
    return np.cumsum(lengths) - lengths


def _within(lengths: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Sum of the lengths before each that have the same owner. Owners are sorted."""
    before = _before(lengths)
    return before - before[np.searchsorted(owners, owners)] if len(owners) else before


def _spread(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """start, start + 1, ... of each piece, as many as its length."""
    return np.repeat(starts - _before(lengths), lengths) + np.arange(lengths.sum())


def _joined(values: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *values], dtype=dtype, casting="unsafe")
