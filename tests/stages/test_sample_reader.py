"""Tests of a sample file that is checked first, and read again in windows."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from app.prompts.tokenizer import Tokenizer
from app.records.jsonl import write_jsonl
from app.records.sample import Sample
from app.records.sample_json import sample_to_record
from app.stages.sample_reader import SampleFileExtent, SampleReader
from app.stages.sample_text import SampleEncoder
from settings.errors import InputError
from tests.tiny import ODD, random_samples


def reader(path: Path) -> SampleReader:
    """Returns a reader for a model without a tokenizer."""

    def load_tokenizer() -> Tokenizer:
        raise InputError("there is no tokenizer.json")

    return SampleReader(path, ODD, SampleEncoder(load_tokenizer, system_prompt=None))


@pytest.fixture
def samples() -> list[Sample]:
    return random_samples(5, 2, vocab_size=ODD.vocab_size)


@pytest.fixture
def path(tmp_path: Path, samples: list[Sample]) -> Path:
    write_jsonl(tmp_path / "samples.jsonl", map(sample_to_record, samples))
    return tmp_path / "samples.jsonl"


def test_windows_hold_all_samples_in_order(path: Path, samples: list[Sample]) -> None:
    windows = list(reader(path).windows(4))
    assert list(map(len, windows)) == [4, 4, 2]
    assert [one.sample.uid for window in windows for one in window] == [s.uid for s in samples]


def test_the_extent_is_that_of_the_longest(path: Path, samples: list[Sample]) -> None:
    lengths = [len(s.prompt.token_ids) + len(s.completion_ids) for s in samples]
    extent, drawn = reader(path).check()
    assert extent == SampleFileExtent(
        num_samples=10,
        max_length=max(lengths),
        longest_location=f"{path}:{lengths.index(max(lengths)) + 1}",
        max_completion_length=max(len(s.completion_ids) for s in samples),
    )
    assert drawn == []


def test_every_sample_is_drawn_as_often_as_any_other(path: Path) -> None:
    file = reader(path)
    draws = [[s.uid for s in file.check(num_picked=3, seed=seed)[1]] for seed in range(200)]
    assert all(len(set(drawn)) == 3 for drawn in draws)
    assert draws[7] == [s.uid for s in file.check(num_picked=3, seed=7)[1]]
    counts = Counter(uid for drawn in draws for uid in drawn)
    # 600 draws of 10: 60 each, within five standard deviations.
    assert len(counts) == 10 and all(28 <= count <= 92 for count in counts.values())


def test_fewer_samples_than_asked_for_are_all_drawn(path: Path) -> None:
    assert len(reader(path).check(num_picked=30)[1]) == 10


@pytest.mark.parametrize("new", [None, "longer"])
def test_a_file_that_changes_between_the_passes_is_named(path: Path, new: str | None) -> None:
    file = reader(path)
    file.check()
    content = path.read_text()
    path.unlink()
    if new is not None:
        path.write_text(content + content)
    with pytest.raises(InputError, match="has changed while it was being scored; nothing was written"):
        list(file.windows(4))


def test_a_file_that_changes_between_windows_is_named(path: Path) -> None:
    windows = reader(path).windows(4)
    next(windows)
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    with pytest.raises(InputError, match="has changed"):
        next(windows)
