"""Watches the hosts of a command: if one hangs, fails or is stopped, all others report why and exit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import jax

from app.distributed.collectives import error_barrier
from app.distributed.shutdown import coordinated_shutdown
from app.distributed.status_board import open_status_board
from app.distributed.watchdog import WAIT_PHASE, Watchdog
from app.mesh import jax_startup
from settings import Settings

Item = TypeVar("Item")

PhaseCallback = Callable[[str], None]
"""Called with the name of a phase when it begins, and again when it makes progress."""


@contextmanager
def watch_hosts(settings: Settings, crash_dir: Path) -> Iterator[Watchdog]:
    """Watches all hosts within the `with` block, which begins in the phase `compile`.

    Call `jax_startup.initialize_distributed` first. Stack traces of a process that hangs are written to `crash_dir`.
    """
    with (
        open_status_board() as status_board,
        Watchdog(settings.watchdog.phase_s, crash_dir, status_board) as watchdog,
        coordinated_shutdown(status_board, enter_phase=watchdog.enter_phase),
    ):
        yield watchdog


@contextmanager
def join_hosts(settings: Settings, *, out: Path) -> Iterator[PhaseCallback]:
    """Joins the other hosts for a command that writes one file; a single host is not watched.

    Stack traces of a process that hangs are written to `<out>.crash/`.
    """
    jax_startup.initialize_distributed(settings.mesh)
    if jax.process_count() == 1:
        yield lambda phase: None
        return
    with watch_hosts(settings, out.with_name(f"{out.name}.crash")) as watchdog:
        yield watchdog.enter_phase


def wait_for_other_hosts(on_phase: PhaseCallback) -> None:
    """Waits for the other hosts, without a time limit."""
    on_phase(WAIT_PHASE)
    with error_barrier():
        pass


def iterate_in_phase(items: Iterable[Item], phase: str, on_phase: PhaseCallback) -> Iterator[Item]:
    """Yields the items, and reports each one to the watchdog as progress of the phase."""
    on_phase(phase)
    for part in items:
        on_phase(phase)
        yield part
