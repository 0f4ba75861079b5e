"""Gathers tables of numbers from all hosts onto every host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from app.distributed.collectives import gather_over_hosts


def gather_table(columns: Mapping[str, Sequence[float]]) -> dict[str, np.ndarray]:
    """Returns the columns with the rows of all hosts, in host order. Hosts must have the same columns."""
    table = np.asarray(list(columns.values()), np.float64).T
    counts = gather_over_hosts(np.asarray(len(table)))
    padded = np.zeros((counts.max(initial=0), len(columns)))
    padded[: len(table)] = table
    rows = np.concatenate([part[:count] for part, count in zip(gather_over_hosts(padded), counts, strict=True)])
    return dict(zip(columns, rows.T, strict=True))
