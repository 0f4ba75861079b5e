"""Tests of runs with `rollout.slots` and `rollout.scheduler`."""

from __future__ import annotations

from pathlib import Path

from tests.program import (
    records_of,
)

SLOTS = "rollout.slots=8"
WORKERS = ("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4")
SCHEDULED = ("rollout.scheduler=adaptive", *WORKERS)


def texts(path: Path) -> list[tuple[str, int, str]]:
    return [(r["group_id"], r["sample_index"], r["completion"]) for r in records_of(path)]
