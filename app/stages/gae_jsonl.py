"""`grpo gae` on a JSON Lines file: some samples at a time, credited as training does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.advantage.token_advantages import truncation_bootstrap
from app.batching.length_buckets import bucket_length
from app.records.jsonl import read_jsonl_with_sizes, write_jsonl
from app.records.moments import Moments, joint_moments, merge_moments
from app.records.sample import Sample
from app.records.sample_json import sample_for_advantages
from app.runtime.advantages import make_gae_advantages
from app.stages.gae_summary import AdvantageTransform, GaeSummary, ProgressPrinter, check_trainable, choose_gae_backend
from settings import Settings
from settings.errors import InputError

WINDOW_TOKENS = 1 << 17
"""Of a window: completion tokens. A single sample may have more."""
WINDOW_BYTES = 1 << 24
"""Of a window: bytes of its lines, which take about ten times as much in memory. A single line may have more."""
WINDOW_SAMPLES = 4096
"""Of a window, however short they are."""


class LocatedSample(NamedTuple):
    """A sample, and where it stands in its file."""

    where: str
    num_bytes: int
    """Of its line."""
    record: dict[str, Any]
    sample: Sample


class GaeSampleFile:
    """Samples in a JSON Lines file."""

    has_logprobs = True

    def __init__(self, path: Path, settings: Settings, *, window_tokens: int = WINDOW_TOKENS) -> None:
        self.summary = GaeSummary("samples")
        self._path = path
        self._algorithm = settings.algorithm
        # A sample of such a file says itself whether it goes on.
        self._credit = make_gae_advantages(settings, bootstrap=truncation_bootstrap)
        self._window_tokens = window_tokens
        self._num_samples = 0
        self._progress = ProgressPrinter()

    def check(self) -> None:
        """Reads every line.

        Raises:
            InputError: a line that cannot be used, named, or none, or masks without a token.
        """
        num_tokens = num_trainable = 0
        for number, one in enumerate(self._samples(), start=1):
            self._num_samples = number
            num_tokens += len(one.sample.completion_ids)
            num_trainable += int(one.sample.mask.sum())
            # A finish_reason of its own that was overruled.
            was_cut = one.record.get("finish_reason") == "length"
            has_more = len(one.record["values"]) > len(one.sample.completion_ids)
            self.summary.num_unused_bootstraps += was_cut and has_more and one.sample.finish_reason != "length"
            self._progress.print_line(f"checked {number:,} samples")
        if not self._num_samples:
            raise InputError(f"--input: {self._path} holds no samples")
        check_trainable(
            self._path, "samples", num_rows=self._num_samples, num_tokens=num_tokens, num_trainable=num_trainable
        )

    def advantage_moments(self) -> Moments:
        """Over the tokens that the policy wrote, in the whole file."""
        return merge_moments(
            joint_moments([(_not_none(s.advantages), s.mask) for s in samples])
            for samples, _ in self._advantage_windows()
        )

    def write(self, out: Path, transform: AdvantageTransform) -> None:
        """Writes every record as it came, with `advantages` and `returns`.

        Raises:
            InputError: numbers that are too large; nothing is written.
        """
        write_jsonl(out, self._records_with_advantages(transform))

    def _records_with_advantages(self, transform: AdvantageTransform) -> Iterator[dict[str, Any]]:
        for samples, placed in self._advantage_windows():
            masks = [s.mask for s in samples]
            advantages = [transform(_not_none(s.advantages), mask) for s, mask in zip(samples, masks, strict=True)]
            returns = [_not_none(s.returns) for s in samples]
            self.summary.add(*map(np.concatenate, (advantages, returns, masks)), num_rows=len(samples))
            if self.summary.num_rows < self._num_samples:
                self._progress.print_line(f"estimated {self.summary.num_rows:,} of {self._num_samples:,} samples")
            for one, its_advantages, its_returns in zip(placed, advantages, returns, strict=True):
                yield one.record | {"advantages": its_advantages.tolist(), "returns": its_returns.tolist()}

    def _advantage_windows(self) -> Iterator[tuple[list[Sample], list[LocatedSample]]]:
        for placed in sample_windows(self._samples(), window_tokens=self._window_tokens):
            samples = self._credit([one.sample for one in placed], self._algorithm.beta)
            if not _are_finite(samples):
                self._raise_non_finite(placed)
            if self.summary.choice is None:
                shape = (1, bucket_length(sum(len(s.completion_ids) for s in samples)))
                self.summary.choice = choose_gae_backend(self._algorithm, shape, is_masked=True)
            yield samples, placed

    def _raise_non_finite(self, located_samples: Sequence[LocatedSample]) -> None:
        # An infinity spreads over its whole row: whose it is shows where every sample has a row of its own.
        for one in located_samples:
            if not _are_finite(self._credit([one.sample], self._algorithm.beta)):
                raise InputError(f"{one.where}: rewards or values are too large: its advantages leave float32")

    def _samples(self) -> Iterator[LocatedSample]:
        algorithm = self._algorithm
        for line, num_bytes, record in read_jsonl_with_sizes(self._path):
            where = f"{self._path}:{line}"
            sample = sample_for_advantages(
                record,
                where=where,
                bootstrap_truncated=algorithm.bootstrap_truncated,
                needs_logprobs=algorithm.kl_in_reward,
            )
            yield LocatedSample(where, num_bytes, record, sample)


def _not_none(array: np.ndarray | None) -> np.ndarray:
    assert array is not None
    return array


def _are_finite(samples: Sequence[Sample]) -> bool:
    return all(np.isfinite(_not_none(part)).all() for s in samples for part in (s.advantages, s.returns))


def sample_windows(
    samples: Iterable[LocatedSample], *, window_tokens: int, window_bytes: int = WINDOW_BYTES
) -> Iterator[list[LocatedSample]]:
    """Neighbouring samples of at most so many tokens and bytes together, or one that has more."""
    window: list[LocatedSample] = []
    num_tokens = num_bytes = 0
    for one in samples:
        length = len(one.sample.completion_ids)
        is_full = num_tokens + length > window_tokens or num_bytes + one.num_bytes > window_bytes
        if window and (is_full or len(window) == WINDOW_SAMPLES):
            yield window
            window, num_tokens, num_bytes = [], 0, 0
        window.append(one)
        num_tokens += length
        num_bytes += one.num_bytes
    if window:
        yield window
