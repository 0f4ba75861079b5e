"""Gathers tables of numbers, and sets of names, from all hosts onto every host."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from app.distributed.collectives import gather_bytes_over_hosts, gather_over_hosts


def gather_table(columns: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Returns the columns with the rows of all hosts, in host order. Hosts must have the same columns."""
    table = np.asarray(list(columns.values()), np.float64).T
    counts = gather_over_hosts(np.asarray(len(table)))
    padded = np.zeros((counts.max(initial=0), len(columns)))
    padded[: len(table)] = table
    rows = np.concatenate([part[:count] for part, count in zip(gather_over_hosts(padded), counts, strict=True)])
    return dict(zip(columns, rows.T, strict=True))


def gather_names(names: Iterable[str]) -> list[str]:
    """Returns the sorted names that occur on any host."""
    return sorted(
        {name for host in gather_bytes_over_hosts(json.dumps(sorted(names)).encode()) for name in json.loads(host)}
    )
