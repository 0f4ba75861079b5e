"""The messages of a rollout that host 0 schedules on the workers of all hosts.

Each host joins with its workers and submits its rows. Host 0 sends commands to the workers, and sends every row home
once it is done. A message travels with the number of its rollout, so that late ones of an earlier rollout have no
effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.rollout.scheduling.protocol import RunSegment, WorkerKind
from app.rollout.sequence import RolloutSequence
from app.rollout.workers.remote_worker import RemoteSegment
from app.rollout.workers.worker import Admission


class WorkerInfo(NamedTuple):
    name: str
    kind: WorkerKind
    device: str | None


@dataclass(frozen=True, slots=True)
class Joined:
    """To host 0: these workers are open."""

    workers: Sequence[WorkerInfo]


@dataclass(frozen=True, slots=True)
class Submitted:
    """To host 0: these rows are to be generated, as the next round if there are several."""

    rows: Sequence[RolloutSequence]


@dataclass(frozen=True, slots=True)
class Left:
    """To host 0: the sender takes no further part in the rollout, because it failed or was stopped."""

    is_stop: bool


@dataclass(frozen=True, slots=True)
class SegmentResult:
    """To host 0: the end of a worker's segment."""

    worker: str
    result: RemoteSegment | str
    """What it has drawn, or why the worker has failed."""


@dataclass(frozen=True, slots=True)
class Reopened:
    """To host 0: a worker that it had given up is open again, under its next name."""

    worker: str
    """Its earlier name."""


@dataclass(frozen=True, slots=True)
class StartSegment:
    command: RunSegment
    admissions: Sequence[Admission]
    """Rows to admit, without their caches."""
    caches: Mapping[str, int]
    """Keys of the caches of some of them, by uid."""
    unused: Sequence[int]
    """Keys of caches that nobody needs any more."""


@dataclass(frozen=True, slots=True)
class SuspendRow:
    worker: str
    uid: str
    key: int
    """Key under which the host keeps the cache."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """From host 0: a worker that runs nothing has failed, and its rows are elsewhere."""

    worker: str


@dataclass(frozen=True, slots=True)
class RowDone:
    """From host 0: a row of the receiver, its `home`, is done."""

    row: RolloutSequence


@dataclass(frozen=True, slots=True)
class Progress:
    """From host 0: the rollout makes progress."""


@dataclass(frozen=True, slots=True)
class Ended:
    """From host 0: the rollout is over."""

    is_stop: bool = False
    error: str | None = None
    """Why it failed; None if all rows are done or the rollout was stopped."""


ToFirstHost = Joined | Submitted | Left | SegmentResult | Reopened
FromFirstHost = StartSegment | SuspendRow | GiveUp | RowDone | Progress | Ended
