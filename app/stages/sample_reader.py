"""Streams a sample file in two passes: the first checks every line, the second yields windows of samples."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from app.model.architecture import Architecture
from app.records.sample import Sample
from app.records.sample_json import read_samples
from settings import Resolved
from settings.errors import InputError
from settings.loading.fields import value_of

WINDOW_SAMPLES = 4096
"""Number of samples in memory at once: enough to fill rows well, and only some tens of MB."""


@dataclass(frozen=True)
class SampleFileExtent:
    """Number of samples in a file and their largest lengths, in tokens."""

    num_samples: int
    max_length: int
    longest_location: str
    """File and line of the longest sample."""
    max_completion_length: int


class SampleReader:
    """Samples of one model in a JSON Lines file, which must not change while it is read.

    Raises:
        InputError: the path is not a regular file but, for example, a pipe, which cannot be read twice.
    """

    def __init__(self, path: Path, architecture: Architecture) -> None:
        if path.exists() and not path.is_file():
            raise InputError(f"--input: {path} is not a regular file; it must be read twice, for checking and scoring")
        self._path = path
        self._architecture = architecture
        self._stamp = file_stamp(path) if path.exists() else None

    def check(self, *, num_picked: int = 0, seed: int = 0) -> tuple[SampleFileExtent, list[Sample]]:
        """Returns the extent of the file, and `num_picked` random samples, or all samples if there are fewer.

        Raises:
            InputError: a line is not a sample of this model, or the file has no samples.
        """
        rng = np.random.default_rng(seed)
        drawn: list[Sample] = []
        count = longest = longest_completion = 0
        longest_at = str(self._path)
        for where, sample in self._samples():
            length = len(sample.prompt.token_ids) + len(sample.completion_ids)
            if length > longest:
                longest, longest_at = length, where
            longest_completion = max(longest_completion, len(sample.completion_ids))
            # Reservoir sampling: every sample so far is picked with equal probability.
            if count < num_picked:
                drawn.append(sample)
            elif (place := int(rng.integers(count + 1))) < num_picked:
                drawn[place] = sample
            count += 1
        if not count:
            raise InputError(f"--input: {self._path} holds no samples")
        return SampleFileExtent(count, longest, longest_at, longest_completion), drawn

    def windows(self, size: int) -> Iterator[list[Sample]]:
        """Yields all samples in order, `size` at a time; the last window may have fewer.

        Raises:
            InputError: the file has changed since it was opened.
        """
        window: list[Sample] = []
        try:
            for _, sample in self._samples():
                window.append(sample)
                if len(window) == size:
                    self._check_unchanged()
                    yield window
                    window = []
        except InputError:
            self._check_unchanged()
            raise
        self._check_unchanged()
        if window:
            yield window

    def _samples(self) -> Iterator[tuple[str, Sample]]:
        for where, sample in read_samples(self._path):
            check_token_ids(sample.prompt.token_ids, sample.completion_ids, self._architecture, where=where)
            yield where, sample

    def _check_unchanged(self) -> None:
        if not self._path.exists() or file_stamp(self._path) != self._stamp:
            raise InputError(f"--input: {self._path} has changed while it was being scored; nothing was written")


def file_stamp(path: Path) -> tuple[int, ...]:
    """Returns a stamp that changes with the file; raises InputError if the file cannot be read."""
    with _naming_read_errors(path):
        status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file; raises InputError if it cannot be read."""
    with _naming_read_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _naming_read_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error


def check_token_ids(
    prompt_ids: np.ndarray, completion_ids: np.ndarray, architecture: Architecture, *, where: str
) -> None:
    """Raises InputError, starting with `where`, if this model cannot have generated the sample."""
    for name, ids in (("prompt_token_ids", prompt_ids), ("completion_token_ids", completion_ids)):
        beyond = np.flatnonzero(ids >= architecture.vocab_size)
        if len(beyond):
            raise InputError(
                f"{where}: {name}[{beyond[0]}] is token {ids[beyond[0]]}, but the vocabulary of model.path ends at "
                f"{architecture.vocab_size - 1}; was it sampled with another tokenizer?"
            )
    length = len(prompt_ids) + len(completion_ids)
    if length > architecture.max_positions:
        raise InputError(
            f"{where}: prompt_token_ids and completion_token_ids have {len(prompt_ids)} + {len(completion_ids)} = "
            f"{length} tokens, but the context of model.path is {architecture.max_positions}; remove the sample, or "
            "use the model that generated it"
        )


def check_token_quota(resolved: Resolved, scope: str, max_length: int, *, where: str) -> None:
    """Checks that the longest sample of a file fits the token quota of a scope, such as `score.policy`.

    Raises:
        InputError: the sample does not fit; the message starts with `where`.
    """
    field = f"{scope}.max_tokens_per_device"
    quota = value_of(resolved.settings, field)
    if quota is not None and max_length > quota:
        raise InputError(
            f"{where}: the longest sample has {max_length} tokens, more than {field} = {quota} (from "
            f"{resolved.origin(field)}), and samples are not split; raise it to {max_length} or more, or set "
            f"{scope}.rows_per_device instead"
        )
