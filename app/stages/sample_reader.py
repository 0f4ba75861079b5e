"""Reads a sample file twice: first to check every line, then to yield windows of samples."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from app.model.architecture import Architecture
from app.model.experts import UNRECORDED
from app.records.jsonl import read_jsonl
from app.records.parquet import read_parquet
from app.records.sample import Sample
from app.records.sample_json import SCORING_FIELDS, LocatedSample, sample_for_scoring
from app.stages.sample_text import SampleEncoder
from settings.errors import InputError

WINDOW_SAMPLES = 4096
"""Number of samples in memory at once: enough to fill packed rows well, but only tens of MB."""


@dataclass(frozen=True)
class SampleFileExtent:
    """Number of samples in a file, and the maximum numbers of tokens in a sample and in a completion."""

    num_samples: int
    max_length: int
    longest_location: str
    """File and line of the longest sample."""
    max_completion_length: int


class SampleReader:
    """Reads the samples of one model from a JSON Lines or Parquet file, which must not change meanwhile.

    Raises:
        InputError: the path is not a regular file but, for example, a pipe, which cannot be read twice.
    """

    def __init__(
        self, path: Path, architecture: Architecture, encoder: SampleEncoder, *, replays_routes: bool = False
    ) -> None:
        if path.exists() and not path.is_file():
            raise InputError(f"--input: {path} is not a regular file, but must be read twice; save it to a file")
        self._path = path
        self._architecture = architecture
        self._encoder = encoder
        self._fields = [name for name in SCORING_FIELDS if replays_routes or name != "routes"]
        self._stamp = file_stamp(path)

    def check(self) -> SampleFileExtent:
        """Checks every line, and returns the extent of the file.

        Raises:
            InputError: a line is not a sample of this model, or the file has no samples.
        """
        count = longest = longest_completion = 0
        longest_at = str(self._path)
        for where, record, sample in self._samples():
            self._encoder.check_text_of_ids(record, where=where)
            length = len(sample.prompt.token_ids) + len(sample.completion_ids)
            if length > longest:
                longest, longest_at = length, where
            longest_completion = max(longest_completion, len(sample.completion_ids))
            count += 1
        if not count:
            raise InputError(f"--input: {self._path} contains no samples; give a file written by grpo rollout")
        return SampleFileExtent(count, longest, longest_at, longest_completion)

    def windows(self, size: int) -> Iterator[list[LocatedSample]]:
        """Yields all samples in order, `size` at a time; the last window may have fewer.

        Raises:
            InputError: the file has changed since it was opened.
        """
        samples = self._samples()
        try:
            while window := list(islice(samples, size)):
                self._check_unchanged()
                yield window
        except InputError:
            self._check_unchanged()
            raise
        self._check_unchanged()

    def _samples(self) -> Iterator[LocatedSample]:
        for index, (where, record) in enumerate(read_records(self._path)):
            with_ids = self._encoder.with_token_ids(record, where=where)
            sample = sample_for_scoring(with_ids, where=where, index=index, names=self._fields)
            check_fits(sample, self._architecture, where=where)
            yield LocatedSample(where, record, sample)

    def _check_unchanged(self) -> None:
        if file_stamp(self._path) != self._stamp:
            raise InputError(f"--input: {self._path} changed during scoring, so nothing was written; score it again")


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields (location, object) for every line of a JSON Lines file or row of a .parquet file; NaN becomes None.

    Raises:
        InputError: the file cannot be read, or an object has a value that JSON does not support.
    """
    if path.suffix.lower() != ".parquet":
        yield from ((f"{path}:{line}", record) for line, record in read_jsonl(path, reads_nan=True))
        return
    for where, record in read_parquet(path):
        try:
            json.dumps(record, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{where}: cannot be written as JSON: {error}; remove or convert the column with this value"
            ) from None
        yield where, record


def file_stamp(path: Path) -> tuple[int, ...]:
    """Returns a tuple that changes whenever the file changes; it is empty if there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file; raises InputError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}; give another file") from error


def check_fits(sample: Sample, architecture: Architecture, *, where: str) -> None:
    """Raises InputError, whose message starts with `where`, if this model cannot have generated the sample."""
    prompt_ids, completion_ids = sample.prompt.token_ids, sample.completion_ids
    for name, ids in (("prompt_token_ids", prompt_ids), ("completion_token_ids", completion_ids)):
        beyond = np.flatnonzero(ids >= architecture.vocab_size)
        if len(beyond):
            raise InputError(
                f"{where}: {name}[{beyond[0]}] is token {ids[beyond[0]]}, but the vocabulary of model.path ends at "
                f"{architecture.vocab_size - 1}; set model.path to the model that sampled it"
            )
    length = len(prompt_ids) + len(completion_ids)
    if length > architecture.max_positions:
        raise InputError(
            f"{where}: prompt_token_ids and completion_token_ids have {len(prompt_ids)} + {len(completion_ids)} = "
            f"{length} tokens, but the context of model.path is {architecture.max_positions}; remove the sample, or "
            "set model.path to the model that generated it"
        )
    if sample.routes is not None:
        _check_routes(sample.routes, architecture, where=where)


def _check_routes(routes: UInt8[np.ndarray, "T L k"], architecture: Architecture, *, where: str) -> None:
    shape, experts = architecture.route_shape, architecture.num_experts
    way_out = "set model.path to the model that sampled it, or set rollout.routing_replay: false"
    if shape is None or experts is None or routes.shape[1:] != shape:
        of_model = "none" if shape is None else f"{shape[1]} in each of {shape[0]} layers"
        raise InputError(
            f"{where}: routes has {routes.shape[2]} experts in each of {routes.shape[1]} layers, but model.path has "
            f"{of_model}; {way_out}"
        )
    is_known = (routes < experts).all(axis=2) & (np.diff(np.sort(routes, axis=2), axis=2) > 0).all(axis=2)
    wrong = np.argwhere(~is_known & (routes != UNRECORDED).any(axis=2))
    if len(wrong):
        token, layer = wrong[0].tolist()
        raise InputError(
            f"{where}: routes sends token {token} through experts {routes[token, layer].tolist()} of layer {layer}, "
            f"but model.path has {experts} experts, and a token uses each at most once; {way_out}"
        )
