"""What hosts share out, do together, and bring to the first of them, which writes the files."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts, gather_bytes_to_first_host, max_over_hosts
from app.records.atomic_write import open_atomic
from app.records.jsonl import check_output_path, to_json_line
from app.records.sample import Sample
from app.records.sample_json import PER_TOKEN_FIELDS, sample_from_record, sample_to_record
from settings.errors import InputError

Item = TypeVar("Item")

TOKEN_ARRAY_FIELDS = ("behavior_logprobs", *PER_TOKEN_FIELDS)


def host_shard(num_items: int, *, host: int | None = None) -> range:
    """Which of so many a host has, this one by default. Runs follow each other, and differ in length by one at most."""
    each, rest = divmod(num_items, jax.process_count())
    host = jax.process_index() if host is None else host
    first = host * each + min(host, rest)
    return range(first, first + each + (host < rest))


def max_shard_size(num_items: int) -> int:
    """How many of them the host has that has most."""
    return -(-num_items // jax.process_count())


def per_host_path(path: Path) -> Path:
    """A file that each host writes: the same name where there is one host, else `name.host_0_of_2.suffix`."""
    if jax.process_count() == 1:
        return path
    return path.with_name(f"{path.stem}.host_{jax.process_index()}_of_{jax.process_count()}{path.suffix}")


@contextmanager
def error_barrier() -> Iterator[None]:
    """What stops one host inside stops all of them behind it. Every host enters; nothing inside waits for another.

    Raises:
        InputError: on the hosts that it did not come from, too, where any host has raised one.
        RuntimeError: on the others, whatever else one host has raised.
    """
    if jax.process_count() == 1:
        yield
        return
    problem: Exception | None = None
    try:
        yield
    except jax.errors.JaxRuntimeError:
        # Maybe another host has died, and would not answer.
        raise
    # Blanket, because the others wait for this host whatever it is; it goes on its way below.
    except Exception as error:
        problem = error
    kind = 0 if problem is None else 2 if isinstance(problem, InputError) else 1
    worst = int(max_over_hosts(np.asarray(kind)))
    if not worst:
        return
    said = gather_bytes_over_hosts(json.dumps([kind, socket.gethostname(), _error_message(problem)]).encode())
    if problem is not None:
        raise problem
    host, name, reason = next((i, *rest) for i, (found, *rest) in enumerate(map(json.loads, said)) if found == worst)
    raise (InputError if worst == 2 else RuntimeError)(f"on host {host} ({name}): {reason}")


def _error_message(error: Exception | None) -> str:
    """In the words of an error of ours; with its kind, of another."""
    return str(error) if isinstance(error, InputError | RuntimeError) else f"{type(error).__name__}: {error}"


def iterate_in_lockstep(items: Iterable[Item]) -> Iterator[Item]:
    """The same on every host, which all have as many: each is made `together`."""
    iterator = iter(items)
    while True:
        with error_barrier():
            part = list(islice(iterator, 1))
        if not part:
            return
        yield part[0]


def sample_json_lines(samples: Iterable[Sample], *, path: Path, first_record: int = 1) -> Iterator[bytes]:
    """Of a file.

    Args:
        first: number of the first of them, for errors.

    Raises:
        ValueError: a sample holds NaN or an infinity, which JSON cannot say.
    """
    whose = "" if jax.process_count() == 1 else f" of host {jax.process_index()}"
    for number, sample in enumerate(samples, start=first_record):
        yield to_json_line(sample_to_record(sample), f"{path}: record {number}{whose}")


def sample_json_lines_by_part(parts: Iterable[Sequence[Sample]], *, path: Path) -> Iterator[Iterator[bytes]]:
    """As `as_lines`, part by part."""
    number = 1
    for part in parts:
        yield sample_json_lines(part, path=path, first_record=number)
        number += len(part)


def write_collectively(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """One file of the lines of all hosts, whole or not at all: part after part, of each host after host.

    The first host writes it, and with several hosts holds one part at once, of all of them.

    Args:
        parts: this host's lines of each part; as many parts on every host.

    Raises:
        InputError: `path` cannot be a file.
    """
    with error_barrier():
        check_output_path(path)
    with ExitStack() as stack:
        file = stack.enter_context(open_atomic(path.absolute())) if jax.process_index() == 0 else None
        for part in parts:
            if jax.process_count() == 1:
                assert file is not None
                file.writelines(part)
                continue
            with error_barrier():
                own = b"".join(part)
            lines = gather_bytes_to_first_host(own)
            with error_barrier():
                if file is not None:
                    file.writelines(lines)
        with error_barrier():
            stack.close()


def gather_lines_to_first_host(local_lines: Sequence[str]) -> Sequence[str]:
    """On the first host every host's, each with whose it is where there are several; nothing on the others."""
    if jax.process_count() == 1:
        return local_lines
    said = map(json.loads, gather_bytes_to_first_host(json.dumps(local_lines).encode()))
    return [f"host {host}: {line}" for host, lines in enumerate(said) for line in lines]


def gather_samples_to_first_host(local_samples: Sequence[Sample]) -> Sequence[Sample]:
    """On the first host every host's, host after host; nothing on the others."""
    if jax.process_count() == 1:
        return local_samples
    sent = gather_bytes_to_first_host(json.dumps([sample_to_record(sample) for sample in local_samples]).encode())
    return [decode_gathered_sample(record) for records in sent for record in json.loads(records)]


def decode_gathered_sample(record: Mapping[str, Any]) -> Sample:
    """The sample as it left its host, also with numbers that no file may have: a NaN is for the update to find."""
    floats = {name: np.asarray(record[name], np.float32) for name in TOKEN_ARRAY_FIELDS if name in record}
    finite = {name: np.zeros(len(values)).tolist() for name, values in floats.items()}
    return replace(sample_from_record({**record, **finite}, where="a sample of another host"), **floats)
