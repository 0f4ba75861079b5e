"""Work that hosts do together: one that hangs, fails or is stopped ends the others, and says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import jax

from app.distributed.lockstep import together
from app.distributed.shutdown import parting
from app.distributed.status_board import Bulletin, open_bulletin
from app.distributed.watchdog import WAIT, Watchdog
from app.mesh import topology
from settings import Settings

Part = TypeVar("Part")

Entered = Callable[[str], None]
"""Is told the phase that begins, and again whenever it gets on."""


class Guard(NamedTuple):
    bulletin: Bulletin
    watchdog: Watchdog


@contextmanager
def guarded(settings: Settings, folder: Path) -> Iterator[Guard]:
    """What comes inside is watched, from the phase `compile` on. `topology.start` must have run.

    Args:
        folder: where stacks go when it hangs.
    """
    heartbeat_s = settings.mesh.heartbeat_s
    with (
        open_bulletin() as bulletin,
        Watchdog(settings.watchdog, folder, bulletin) as watchdog,
        parting(bulletin, heartbeat_s=heartbeat_s, entered=watchdog.enter),
    ):
        yield Guard(bulletin, watchdog)


def unwatched(phase: str) -> None:
    """Nobody is told."""


@contextmanager
def joined_hosts(settings: Settings, *, out: Path) -> Iterator[Entered]:
    """Joins the other hosts for a verb that writes one file. Alone, nobody waits for this host, and nothing is watched.

    Stacks go to `<out>.crash/`.
    """
    topology.start(settings.mesh)
    if jax.process_count() == 1:
        yield unwatched
        return
    with guarded(settings, out.with_name(f"{out.name}.crash")) as guard:
        yield guard.watchdog.enter


def wait_for_others(entered: Entered) -> None:
    """However long they take."""
    entered(WAIT)
    with together():
        pass


def getting_on(parts: Iterable[Part], phase: str, entered: Entered) -> Iterator[Part]:
    """The same; the phase begins anew with each."""
    entered(phase)
    for part in parts:
        entered(phase)
        yield part
