"""`grpo gae` on a JSON Lines file: some samples at a time, credited as training does it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from app.advantage.token_advantages import bootstrapped_if_truncated
from app.batching.length_buckets import rung
from app.records.jsonl import read_jsonl_sized, write_jsonl
from app.records.moments import Moments, joint_moments, merged
from app.records.sample import Sample
from app.records.sample_json import credited_sample
from app.runtime.advantages import wire_gae_credit
from app.stages.gae_summary import Finish, Progress, Tally, check_trainable, choice_of
from settings import Settings
from settings.errors import InputError

WINDOW_TOKENS = 1 << 17
"""Of a window: completion tokens. A single sample may have more."""
WINDOW_BYTES = 1 << 24
"""Of a window: bytes of its lines, which take about ten times as much in memory. A single line may have more."""
WINDOW_SAMPLES = 4096
"""Of a window, however short they are."""


class Placed(NamedTuple):
    """A sample, and where it stands in its file."""

    where: str
    num_bytes: int
    """Of its line."""
    record: dict[str, Any]
    sample: Sample


class SampleFile:
    """Samples in a JSON Lines file."""

    has_logprobs = True

    def __init__(self, path: Path, settings: Settings, *, window_tokens: int = WINDOW_TOKENS) -> None:
        self.tally = Tally("samples")
        self._path = path
        self._algorithm = settings.algorithm
        # A sample of such a file says itself whether it goes on.
        self._credit = wire_gae_credit(settings, bootstrap=bootstrapped_if_truncated)
        self._window_tokens = window_tokens
        self._num_samples = 0
        self._progress = Progress()

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
            self.tally.num_ended_early += was_cut and has_more and one.sample.finish_reason != "length"
            self._progress.tell(f"checked {number:,} samples")
        if not self._num_samples:
            raise InputError(f"--input: {self._path} holds no samples")
        check_trainable(
            self._path, "samples", num_rows=self._num_samples, num_tokens=num_tokens, num_trainable=num_trainable
        )

    def advantage_moments(self) -> Moments:
        """Over the tokens that the policy wrote, in the whole file."""
        return merged(
            joint_moments([(_known(s.advantages), s.mask) for s in samples]) for samples, _ in self._credits()
        )

    def write(self, out: Path, finish: Finish) -> None:
        """Writes every record as it came, with `advantages` and `returns`.

        Raises:
            InputError: numbers that are too large; nothing is written.
        """
        write_jsonl(out, self._credited(finish))

    def _credited(self, finish: Finish) -> Iterator[dict[str, Any]]:
        for samples, placed in self._credits():
            masks = [s.mask for s in samples]
            advantages = [finish(_known(s.advantages), mask) for s, mask in zip(samples, masks, strict=True)]
            returns = [_known(s.returns) for s in samples]
            self.tally.count(*map(np.concatenate, (advantages, returns, masks)), num_rows=len(samples))
            if self.tally.num_rows < self._num_samples:
                self._progress.tell(f"estimated {self.tally.num_rows:,} of {self._num_samples:,} samples")
            for one, its_advantages, its_returns in zip(placed, advantages, returns, strict=True):
                yield one.record | {"advantages": its_advantages.tolist(), "returns": its_returns.tolist()}

    def _credits(self) -> Iterator[tuple[list[Sample], list[Placed]]]:
        for placed in sample_windows(self._samples(), window_tokens=self._window_tokens):
            samples = self._credit([one.sample for one in placed], self._algorithm.beta)
            if not _are_finite(samples):
                self._refuse_too_large(placed)
            if self.tally.choice is None:
                shape = (1, rung(sum(len(s.completion_ids) for s in samples)))
                self.tally.choice = choice_of(self._algorithm, shape, is_masked=True)
            yield samples, placed

    def _refuse_too_large(self, placed: Sequence[Placed]) -> None:
        # An infinity spreads over its whole row: whose it is shows where every sample has a row of its own.
        for one in placed:
            if not _are_finite(self._credit([one.sample], self._algorithm.beta)):
                raise InputError(f"{one.where}: rewards or values are too large: its advantages leave float32")

    def _samples(self) -> Iterator[Placed]:
        algorithm = self._algorithm
        for line, num_bytes, record in read_jsonl_sized(self._path):
            where = f"{self._path}:{line}"
            sample = credited_sample(
                record, where=where, bootstraps=algorithm.bootstrap_truncated, needs_logprobs=algorithm.kl_in_reward
            )
            yield Placed(where, num_bytes, record, sample)


def _known(part: np.ndarray | None) -> np.ndarray:
    assert part is not None
    return part


def _are_finite(samples: Sequence[Sample]) -> bool:
    return all(np.isfinite(_known(part)).all() for s in samples for part in (s.advantages, s.returns))


def sample_windows(
    samples: Iterable[Placed], *, window_tokens: int, window_bytes: int = WINDOW_BYTES
) -> Iterator[list[Placed]]:
    """Neighbouring samples of at most so many tokens and bytes together, or one that has more."""
    window: list[Placed] = []
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
