"""Computes GAE for the samples of a JSON Lines file, some samples at a time, with the same results as in training."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.advantage.token_advantages import TokenRows, concatenate_samples, truncation_bootstrap, zero_bootstrap
from app.advantage.token_rewards import task_token_rewards
from app.records.jsonl import read_jsonl, write_jsonl
from app.records.sample_json import LocatedSample, sample_for_advantages
from app.runtime.advantages import make_gae_advantages
from settings import Settings
from settings.errors import InputError

WINDOW_TOKENS = 1 << 17
"""Maximum number of completion tokens in memory at once; a single longer sample is allowed."""
WINDOW_SAMPLES = 4096
"""Maximum number of samples in memory at once."""
PROGRESS_INTERVAL_S = 2.0


class GaeSampleFile:
    """Computes GAE for a JSON Lines file, which is read once for checking and once per pass over the advantages."""

    ROW_NAME = "samples"

    def __init__(
        self,
        path: Path,
        settings: Settings,
        *,
        backend: str = "numpy",
        mask_mode: str = "skip",
        window_tokens: int = WINDOW_TOKENS,
    ) -> None:
        if settings.algorithm.kl_in_advantage:
            raise InputError(
                "algorithm.kl_in: advantage is not supported by grpo gae, because training subtracts this penalty "
                "after GAE; set algorithm.kl_in to reward, or algorithm.beta to 0"
            )
        self._path = path
        self._algorithm = settings.algorithm
        self._discounts_turns = settings.env.turn_discount < 1
        # In such a file, a sample's finish_reason determines whether the value after its last token counts.
        self._estimate = make_gae_advantages(
            settings, bootstrap=truncation_bootstrap, backend=backend, mask_mode=mask_mode
        )
        self._window_tokens = window_tokens
        self._num_samples = 0
        self._last_progress_s = time.monotonic()

    def check(self) -> tuple[int, int, int]:
        """Reads and checks every line; returns the numbers of samples, of tokens and of unmasked tokens.

        Raises:
            InputError: a line cannot be used, or the file has no samples.
        """
        num_tokens = num_trainable = 0
        for number, one in enumerate(self._samples(), start=1):
            self._num_samples = number
            num_tokens += len(one.sample.completion_ids)
            num_trainable += int(one.sample.mask.sum())
            self._print_progress(f"checked {number:,} samples")
        if not self._num_samples:
            raise InputError(f"--input: {self._path} contains no samples; give a file written by grpo score")
        return self._num_samples, num_tokens, num_trainable

    def read_rows(self) -> TokenRows:
        """Returns all samples concatenated in one row, as in training; truncated samples count as complete."""
        samples = [one.sample for one in self._samples()]
        return concatenate_samples(samples, token_rewards=task_token_rewards, bootstrap=zero_bootstrap)

    def estimates(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yields the concatenated (advantages, returns, masks) of some samples at a time."""
        for parts, _ in self._windows():
            advantages, returns, masks = map(np.concatenate, zip(*parts, strict=True))
            yield advantages, returns, masks

    def write(self, out: Path, finish: Callable[..., np.ndarray]) -> None:
        """Writes every record unchanged, with `advantages` and `returns` added.

        Args:
            finish: returns the advantages to write, possibly whitened; see `WrittenAdvantages`.

        Raises:
            InputError: advantages or returns exceed float32; nothing is written.
        """
        write_jsonl(out, self._records(finish))

    def _records(self, finish: Callable[..., np.ndarray]) -> Iterator[dict[str, Any]]:
        done = 0
        for parts, window in self._windows():
            finished = finish(*map(np.concatenate, zip(*parts, strict=True)))
            done += len(parts)
            if done < self._num_samples:
                self._print_progress(f"estimated {done:,} of {self._num_samples:,} samples")
            ends = np.cumsum([len(mask) for *_, mask in parts])
            for one, advantages, (_, returns, _) in zip(window, np.split(finished, ends[:-1]), parts, strict=True):
                yield {**one.record, "advantages": advantages.tolist(), "returns": returns.tolist()}

    def _windows(self) -> Iterator[tuple[list[tuple[np.ndarray, ...]], list[LocatedSample]]]:
        """Yields some samples at a time: (advantages, returns, mask) of each, and the samples."""
        for window in sample_windows(self._samples(), window_tokens=self._window_tokens):
            parts = self._estimates_of(window)
            if not all(np.isfinite(part).all() for one in parts for part in one):
                # An infinity spreads over its whole row; with one sample per row, the sample can be identified.
                for one in window:
                    if not all(np.isfinite(part).all() for part in self._estimates_of([one])[0]):
                        raise InputError(
                            f"{one.where}: rewards or values are so large that advantages exceed float32; scale "
                            "them down"
                        )
            yield parts, window

    def _estimates_of(self, window: Sequence[LocatedSample]) -> list[tuple[np.ndarray, ...]]:
        parts = []
        for sample in self._estimate([one.sample for one in window], self._algorithm.beta):
            assert sample.advantages is not None and sample.returns is not None
            parts.append((sample.advantages, sample.returns, sample.mask))
        return parts

    def _samples(self) -> Iterator[LocatedSample]:
        algorithm = self._algorithm
        for line, record in read_jsonl(self._path):
            where = f"{self._path}:{line}"
            sample = sample_for_advantages(
                record,
                where=where,
                bootstrap_truncated=algorithm.bootstrap_truncated,
                needs_logprobs=algorithm.kl_in_reward,
                needs_turns=self._discounts_turns,
            )
            yield LocatedSample(where, record, sample)

    def _print_progress(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last_progress_s >= PROGRESS_INTERVAL_S:
            self._last_progress_s = now
            print(line, file=sys.stderr, flush=True)


def sample_windows(samples: Iterable[LocatedSample], *, window_tokens: int) -> Iterator[list[LocatedSample]]:
    """Yields consecutive samples with at most `window_tokens` tokens in total, or a single longer sample."""
    window: list[LocatedSample] = []
    num_tokens = 0
    for one in samples:
        length = len(one.sample.completion_ids)
        if window and (num_tokens + length > window_tokens or len(window) == WINDOW_SAMPLES):
            yield window
            window, num_tokens = [], 0
        window.append(one)
        num_tokens += length
    if window:
        yield window
