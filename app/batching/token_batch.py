"""Conversion of samples into padded rows of static shape, and back.

A row is a sequence of segments, distinguished by segment ids. A segment is a prompt with one completion, or a shared
prompt with several, distinguished by branch ids. Quantities per completion token are packed like the targets, as
[R, C].
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt8

from app.batching.micro_batch_plan import MicroBatch, MicroBatchPlan, RowShape
from app.model.architecture import RouteShape
from app.model.experts import UNRECORDED
from app.model.segment_layout import HostOrDevice, SegmentLayout
from app.records.sample import Sample

NO_TARGET = -1
"""Value of `logits_indices` on padding."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenBatch:
    """One micro-batch of packed rows, the input of a forward pass: numpy on the host, global arrays on devices."""

    token_ids: Int32[HostOrDevice, "R T"]
    layout: SegmentLayout
    logits_indices: Int32[HostOrDevice, "R C"]
    """Index in the row of the hidden state that predicts each target: at the token before it or, for the first token of
    a completion, at the last prompt token. -1 where there is no target."""
    targets: Int32[HostOrDevice, "R C"]
    loss_mask: Bool[HostOrDevice, "R C"]
    """True on completion tokens that the policy wrote."""
    routes: UInt8[HostOrDevice, "R T L k"] | None = None
    """The routes to replay; `UNRECORDED` on padding and on tokens without routes. None = no replay."""


def pack_tokens(
    samples: Sequence[Sample], micro_batch: MicroBatch, route_shape: RouteShape | None = None
) -> TokenBatch:
    """Packs prompts and completions into rows. Padding has segment 0, logits index -1 and a False mask.

    Args:
        route_shape: sizes of the routes to replay; None = no replay. A shared prompt gets the routes of its first
            sample with recorded routes.

    Raises:
        ValueError: a row is too short for its samples.
    """
    at = _PackedLayout.from_samples(samples, micro_batch)
    shape = (len(micro_batch.rows), micro_batch.shape.num_tokens)
    prompts, completions = (
        _expand_ranges(at.prompt_starts, at.prompt_lengths),
        _expand_ranges(at.completion_starts, at.completion_lengths),
    )

    def place_routes(size: RouteShape) -> UInt8[np.ndarray, "R T L k"]:
        packed = np.full((shape[0] * shape[1], *size), UNRECORDED, np.uint8)
        segments = (segment for row in micro_batch.rows for segment in row)
        recorded = [next((i for i in segment if samples[i].routes is not None), segment[0]) for segment in segments]
        for sources, starts, of_prompt in (
            (recorded, at.prompt_starts, True),
            (at.completion_sources, at.completion_starts, False),
        ):
            for i, start in zip(sources, starts.tolist(), strict=True):
                if (routes := samples[i].routes) is not None:
                    length = len(samples[i].prompt.token_ids)
                    part = routes[:length] if of_prompt else routes[length:]
                    packed[start : start + len(part)] = part
        return packed.reshape(*shape, *size)

    def rows(prompt_values: Iterable[np.ndarray], completion_values: Iterable[np.ndarray]) -> np.ndarray:
        packed = np.zeros(shape, np.int32)
        packed.reshape(-1)[prompts] = _concatenate(prompt_values, np.int32)
        packed.reshape(-1)[completions] = _concatenate(completion_values, np.int32)
        return packed

    segment_indices = at.completion_segments
    zeros = np.zeros_like(at.prompt_lengths)
    numbers = at.segment_ids
    # The first token of a completion is predicted by the last token of its prompt, wherever the completion is.
    places = completions - 1
    written = at.completion_lengths > 0
    places[_exclusive_cumsum(at.completion_lengths)[written]] = (at.prompt_starts + at.prompt_lengths - 1)[
        segment_indices
    ][written]
    return TokenBatch(
        token_ids=rows(
            [samples[i].prompt.token_ids for i in at.prompt_sources],
            [samples[i].completion_ids for i in at.completion_sources],
        ),
        layout=SegmentLayout(
            segment_ids=rows(
                [np.repeat(numbers, at.prompt_lengths)], [np.repeat(numbers[segment_indices], at.completion_lengths)]
            ),
            branch_ids=rows([np.zeros(len(prompts), np.int32)], [np.repeat(at.branch_ids, at.completion_lengths)]),
            positions=rows(
                [_expand_ranges(zeros, at.prompt_lengths)],
                [_expand_ranges(at.prompt_lengths[segment_indices], at.completion_lengths)],
            ),
        ),
        logits_indices=at.align_to_targets([places % shape[1]], np.int32, padding=NO_TARGET),
        targets=at.align_to_targets([samples[i].completion_ids for i in at.completion_sources], np.int32),
        loss_mask=at.align_to_targets([samples[i].mask for i in at.completion_sources], np.bool_),
        routes=None if route_shape is None else place_routes(route_shape),
    )


def pack_per_token(
    samples: Sequence[Sample], micro_batch: MicroBatch, get_values: Callable[[Sample], np.ndarray]
) -> Float32[np.ndarray, "R C"]:
    """Packs a quantity per completion token like the targets; 0 on padding."""
    at = _PackedLayout.from_samples(samples, micro_batch)
    return at.align_to_targets([get_values(samples[i]) for i in at.completion_sources], np.float32)


def pack_last_target_indices(samples: Sequence[Sample], micro_batch: MicroBatch) -> Int32[np.ndarray, "R C"]:
    """Returns, for each target, the index in its row of the last target of the same sample; -1 on padding."""
    at = _PackedLayout.from_samples(samples, micro_batch)
    last = (at.target_starts + at.completion_lengths - 1) % at.shape[1]
    return at.align_to_targets([np.repeat(last, at.completion_lengths)], np.int32, padding=NO_TARGET)


def unpack_per_token(
    packed: Sequence[Float32[np.ndarray, "R C"]], samples: Sequence[Sample], plan: MicroBatchPlan
) -> list[Float32[np.ndarray, "C"]]:
    """Returns one array per sample, in sample order and without padding; the inverse of `pack_per_token`."""
    values: list[np.ndarray] = [np.zeros(0, np.float32)] * len(samples)
    for rows, micro_batch in zip(packed, plan.micro_batches, strict=True):
        at = _PackedLayout.from_samples(samples, micro_batch)
        flat = rows.reshape(-1)
        for i, first, length in zip(
            at.completion_sources, at.target_starts.tolist(), at.completion_lengths.tolist(), strict=True
        ):
            values[i] = flat[first : first + length]
    return values


class _PackedLayout(NamedTuple):
    """Places of prompts and completions in a micro-batch, as indices into flattened [R, T] (targets: [R, C]) arrays."""

    shape: tuple[int, int]
    """Shape [R, C] of the targets."""
    prompt_sources: list[int]
    """Index of a sample that has the prompt, for each segment."""
    prompt_starts: Int64[np.ndarray, "segments"]
    prompt_lengths: Int64[np.ndarray, "segments"]
    segment_ids: Int64[np.ndarray, "segments"]
    """Segment id of each prompt: 1, 2, ... within a row."""
    completion_sources: list[int]
    """Index of each completion's sample."""
    completion_segments: Int64[np.ndarray, "completions"]
    branch_ids: Int64[np.ndarray, "completions"]
    completion_starts: Int64[np.ndarray, "completions"]
    completion_lengths: Int64[np.ndarray, "completions"]
    target_starts: Int64[np.ndarray, "completions"]

    @classmethod
    def from_samples(cls, samples: Sequence[Sample], micro_batch: MicroBatch) -> _PackedLayout:
        segments = [segment for row in micro_batch.rows for segment in row]
        row = np.repeat(np.arange(len(micro_batch.rows)), [len(row) for row in micro_batch.rows])
        sizes = np.asarray([len(segment) for segment in segments], np.int64)
        owners = [segment[0] for segment in segments]
        members = [i for segment in segments for i in segment]
        prompts = np.asarray([len(samples[i].prompt.token_ids) for i in owners], np.int64)
        lengths = np.asarray([len(samples[i].completion_ids) for i in members], np.int64)
        segment_indices = np.repeat(np.arange(len(segments)), sizes)
        completion_tokens = np.bincount(segment_indices, lengths, len(segments)).astype(np.int64)
        _check_row_lengths(row, prompts + completion_tokens, completion_tokens, micro_batch.shape)
        starts = row * micro_batch.shape.num_tokens + _offsets_within_owner(prompts + completion_tokens, row)
        ordinals = _offsets_within_owner(np.ones_like(lengths), segment_indices) + 1
        return cls(
            shape=(len(micro_batch.rows), micro_batch.shape.num_completion_tokens),
            prompt_sources=owners,
            prompt_starts=starts,
            prompt_lengths=prompts,
            segment_ids=_offsets_within_owner(np.ones_like(row), row) + 1,
            completion_sources=members,
            completion_segments=segment_indices,
            branch_ids=np.where(sizes[segment_indices] > 1, ordinals, 0),
            completion_starts=(starts + prompts)[segment_indices] + _offsets_within_owner(lengths, segment_indices),
            completion_lengths=lengths,
            target_starts=row[segment_indices] * micro_batch.shape.num_completion_tokens
            + _offsets_within_owner(lengths, row[segment_indices]),
        )

    def align_to_targets(self, values: Iterable[np.ndarray], dtype: type, padding: float = 0) -> np.ndarray:
        """Returns an [R, C] array with the values of each completion at its targets, and `padding` elsewhere."""
        packed = np.full(self.shape, padding, dtype)
        packed.reshape(-1)[_expand_ranges(self.target_starts, self.completion_lengths)] = _concatenate(values, dtype)
        return packed


def _check_row_lengths(row: np.ndarray, tokens: np.ndarray, targets: np.ndarray, shape: RowShape) -> None:
    for what, lengths, limit in (
        ("tokens", tokens, shape.num_tokens),
        ("completion tokens", targets, shape.num_completion_tokens),
    ):
        longest = int(np.bincount(row, lengths).max(initial=0))
        if longest > limit:
            raise ValueError(f"the samples of a row have {longest} {what}, but the row has space for {limit}")


def _exclusive_cumsum(lengths: np.ndarray) -> np.ndarray:
    """Returns, for each entry, the sum of all lengths before it."""
    return np.cumsum(lengths) - lengths


def _offsets_within_owner(lengths: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Returns, for each entry, the sum of the lengths before it with the same owner. Owners must be sorted."""
    before = _exclusive_cumsum(lengths)
    return before - before[np.searchsorted(owners, owners)] if len(owners) else before


def _expand_ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the concatenated ranges start, ..., start + length - 1."""
    return np.repeat(starts - _exclusive_cumsum(lengths), lengths) + np.arange(lengths.sum())


def _concatenate(values: Iterable[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype), *values], dtype=dtype, casting="unsafe")
