"""Rows of every host, gathered on all of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from app.distributed.collectives import (
    gather_bytes_over_hosts,
    gather_over_hosts,
)


def gather_values(values: Sequence[float]) -> np.ndarray:
    """Every host's values, host after host; hosts may hold different numbers of them."""
    (gathered,) = gather_table({"": values}).values()
    return gathered


def gather_table(columns: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """The rows of every host's table, host after host. Hosts have the same columns, and any number of rows."""
    table = np.asarray(list(columns.values()), np.float64).T
    counts = gather_over_hosts(np.asarray(len(table)))
    padded = np.zeros((counts.max(initial=0), len(columns)))
    padded[: len(table)] = table
    rows = np.concatenate([part[:count] for part, count in zip(gather_over_hosts(padded), counts, strict=True)])
    return dict(zip(columns, rows.T, strict=True))


def gather_names(names: Iterable[str]) -> list[str]:
    """The names that any host has, sorted."""
    return sorted(
        {name for host in gather_bytes_over_hosts(json.dumps(sorted(names)).encode()) for name in json.loads(host)}
    )
