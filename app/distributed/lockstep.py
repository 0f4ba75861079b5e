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

from app.distributed.collectives import bytes_over_hosts, bytes_to_first_host, max_over_hosts
from app.records.atomic_write import replacing
from app.records.jsonl import check_output, to_line
from app.records.sample import Sample
from app.records.sample_json import PER_TOKEN, sample_from_record, sample_to_record
from settings.errors import InputError

Item = TypeVar("Item")

OF_EACH_TOKEN = ("behavior_logprobs", *PER_TOKEN)


def host_run(count: int, *, host: int | None = None) -> range:
    """Which of so many a host has, this one by default. Runs follow each other, and differ in length by one at most."""
    each, rest = divmod(count, jax.process_count())
    host = jax.process_index() if host is None else host
    first = host * each + min(host, rest)
    return range(first, first + each + (host < rest))


def longest_run(count: int) -> int:
    """How many of them the host has that has most."""
    return -(-count // jax.process_count())


def of_host(path: Path) -> Path:
    """A file that each host writes: the same name where there is one host, else `name.host_0_of_2.suffix`."""
    if jax.process_count() == 1:
        return path
    return path.with_name(f"{path.stem}.host_{jax.process_index()}_of_{jax.process_count()}{path.suffix}")


@contextmanager
def together() -> Iterator[None]:
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
    said = bytes_over_hosts(json.dumps([kind, socket.gethostname(), _reason(problem)]).encode())
    if problem is not None:
        raise problem
    host, name, reason = next((i, *rest) for i, (found, *rest) in enumerate(map(json.loads, said)) if found == worst)
    raise (InputError if worst == 2 else RuntimeError)(f"on host {host} ({name}): {reason}")


def _reason(problem: Exception | None) -> str:
    """In the words of an error of ours; with its kind, of another."""
    return str(problem) if isinstance(problem, InputError | RuntimeError) else f"{type(problem).__name__}: {problem}"


def in_step(parts: Iterable[Item]) -> Iterator[Item]:
    """The same on every host, which all have as many: each is made `together`."""
    iterator = iter(parts)
    while True:
        with together():
            part = list(islice(iterator, 1))
        if not part:
            return
        yield part[0]


def as_lines(samples: Iterable[Sample], *, path: Path, first: int = 1) -> Iterator[bytes]:
    """Of a file.

    Args:
        first: number of the first of them, for errors.

    Raises:
        ValueError: a sample holds NaN or an infinity, which JSON cannot say.
    """
    whose = "" if jax.process_count() == 1 else f" of host {jax.process_index()}"
    for number, sample in enumerate(samples, start=first):
        yield to_line(sample_to_record(sample), f"{path}: record {number}{whose}")


def as_parts(parts: Iterable[Sequence[Sample]], *, path: Path) -> Iterator[Iterator[bytes]]:
    """As `as_lines`, part by part."""
    number = 1
    for part in parts:
        yield as_lines(part, path=path, first=number)
        number += len(part)


def write_together(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """One file of the lines of all hosts, whole or not at all: part after part, of each host after host.

    The first host writes it, and with several hosts holds one part at once, of all of them.

    Args:
        parts: this host's lines of each part; as many parts on every host.

    Raises:
        InputError: `path` cannot be a file.
    """
    with together():
        check_output(path)
    with ExitStack() as stack:
        file = stack.enter_context(replacing(path.absolute())) if jax.process_index() == 0 else None
        for part in parts:
            if jax.process_count() == 1:
                assert file is not None
                file.writelines(part)
                continue
            with together():
                own = b"".join(part)
            lines = bytes_to_first_host(own)
            with together():
                if file is not None:
                    file.writelines(lines)
        with together():
            stack.close()


def lines_to_first_host(own: Sequence[str]) -> Sequence[str]:
    """On the first host every host's, each with whose it is where there are several; nothing on the others."""
    if jax.process_count() == 1:
        return own
    said = map(json.loads, bytes_to_first_host(json.dumps(own).encode()))
    return [f"host {host}: {line}" for host, lines in enumerate(said) for line in lines]


def samples_to_first_host(own: Sequence[Sample]) -> Sequence[Sample]:
    """On the first host every host's, host after host; nothing on the others."""
    if jax.process_count() == 1:
        return own
    sent = bytes_to_first_host(json.dumps([sample_to_record(sample) for sample in own]).encode())
    return [arrived(record) for records in sent for record in json.loads(records)]


def arrived(record: Mapping[str, Any]) -> Sample:
    """The sample as it left its host, also with numbers that no file may have: a NaN is for the update to find."""
    floats = {name: np.asarray(record[name], np.float32) for name in OF_EACH_TOKEN if name in record}
    finite = {name: np.zeros(len(values)).tolist() for name, values in floats.items()}
    return replace(sample_from_record({**record, **finite}, where="a sample of another host"), **floats)
