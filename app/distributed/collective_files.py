"""Gathers the records of all hosts on process 0 and writes them to one file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from app.distributed.collectives import error_barrier, gather_bytes_to_process_0, is_alone, is_process_0
from app.records.atomic_write import open_atomic
from app.records.jsonl import check_output_path, to_json_line
from app.records.sample import Sample
from app.records.sample_json import PER_TOKEN_FIELDS, sample_from_record, sample_to_record
from app.records.shared_rows import share_rows

TOKEN_ARRAY_FIELDS = ("behavior_logprobs", *PER_TOKEN_FIELDS)


def per_host_path(path: Path, *, host: int | None = None) -> Path:
    """Returns the path of a host's part of a file: `name.host_0_of_2.suffix`; on a single host, `path` itself.

    Args:
        host: process index; None = this host.
    """
    if jax.process_count() == 1:
        return path
    host = jax.process_index() if host is None else host
    return path.with_name(f"{path.stem}.host_{host}_of_{jax.process_count()}{path.suffix}")


def host_slice(num_items: int, *, host: int | None = None) -> range:
    """Returns a host's contiguous share of the items. Lengths of shares differ by at most one.

    Args:
        host: process index; None = this host.
    """
    each, rest = divmod(num_items, jax.process_count())
    host = jax.process_index() if host is None else host
    first = host * each + min(host, rest)
    return range(first, first + each + (host < rest))


def sample_json_lines(samples: Iterable[Sample], *, path: Path) -> Iterator[bytes]:
    """Yields the lines of a JSON Lines file of samples; errors name the file `path`, see `to_json_line`."""
    return (to_json_line(record, str(path)) for record in share_rows(map(sample_to_record, samples)))


def write_collectively(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Writes one file with the lines of all hosts, atomically: part after part, and in each part host after host.

    Process 0 writes the file; only it needs the folder. With several hosts, it holds one part of each in memory.

    Args:
        parts: this host's lines of each part; all hosts must have the same number of parts.

    Raises:
        InputError: a file cannot be written at `path`.
    """
    with error_barrier():
        if is_process_0():
            check_output_path(path)
    with ExitStack() as stack:
        file = stack.enter_context(open_atomic(path.absolute())) if jax.process_index() == 0 else None
        for part in parts:
            if is_alone() and file is not None:
                # A part may be a whole file, with several times the bytes of its samples.
                file.writelines(part)
                continue
            with error_barrier():
                local_lines = b"".join(part)
            lines = gather_bytes_to_process_0(local_lines)
            with error_barrier():
                if file is not None:
                    file.writelines(lines)
        with error_barrier():
            stack.close()


def gather_lines_to_process_0(local_lines: Sequence[str]) -> Sequence[str]:
    """Returns the lines of all hosts on process 0, labeled by host if there are several; an empty list elsewhere."""
    if is_alone():
        return local_lines
    gathered = map(json.loads, gather_bytes_to_process_0(json.dumps(local_lines).encode()))
    return [f"host {host}: {line}" for host, lines in enumerate(gathered) for line in lines]


def gather_samples_to_process_0(local_samples: Sequence[Sample]) -> Sequence[Sample]:
    """Returns the samples of all hosts on process 0, in host order; an empty list on the others."""
    if is_alone():
        return local_samples
    sent = gather_bytes_to_process_0(json.dumps([sample_to_record(sample) for sample in local_samples]).encode())
    return [decode_gathered_sample(record) for records in sent for record in json.loads(records)]


def decode_gathered_sample(record: Mapping[str, Any]) -> Sample:
    """Returns the sample in a record sent by a host. Its floats may be NaN, which the update reports."""
    floats = {name: np.asarray(record[name], np.float32) for name in TOKEN_ARRAY_FIELDS if name in record}
    finite = {name: np.zeros(len(values)).tolist() for name, values in floats.items()}
    return replace(sample_from_record({**record, **finite}, where="a sample of another host"), **floats)
