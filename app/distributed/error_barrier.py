"""Collective error barrier: an error on one host becomes an error on all."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import jax
import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts, max_over_hosts
from settings.errors import InputError

Item = TypeVar("Item")


@contextmanager
def error_barrier() -> Iterator[None]:
    """Collective error barrier: if the block raises on any process, it raises on every process.

    Every host must enter the block, and the block must not contain a collective.

    Raises:
        InputError: the block raised an InputError on another host.
        RuntimeError: the block raised any other exception on another host.
    """
    if jax.process_count() == 1:
        yield
        return
    problem: Exception | None = None
    try:
        yield
    except jax.errors.JaxRuntimeError:
        # Raised at once: another host may have died, and a collective would wait for it.
        raise
    # Catches every exception, because the other hosts wait for this one; it is raised again below.
    except Exception as error:
        problem = error
    kind = 0 if problem is None else 2 if isinstance(problem, InputError) else 1
    worst = int(max_over_hosts(np.asarray(kind)))
    if not worst:
        return
    message = str(problem) if kind == 2 or isinstance(problem, RuntimeError) else f"{type(problem).__name__}: {problem}"
    gathered = gather_bytes_over_hosts(json.dumps([kind, socket.gethostname(), message]).encode())
    if problem is not None:
        raise problem
    host, name, reason = next((i, *rest) for i, (code, *rest) in enumerate(map(json.loads, gathered)) if code == worst)
    raise (InputError if worst == 2 else RuntimeError)(f"on host {host} ({name}): {reason}")


def iterate_in_lockstep(items: Iterable[Item]) -> Iterator[Item]:
    """Yields the items, each produced inside an error barrier. All hosts must have the same number of items."""
    iterator = iter(items)
    while True:
        with error_barrier():
            part = list(islice(iterator, 1))
        if not part:
            return
        yield part[0]
