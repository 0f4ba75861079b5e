"""Coordinated shutdown of the hosts, at the end of a run or after an error."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from app.distributed.status_board import POLL_INTERVAL_S, StatusBoard
from settings.errors import InputError

FAILED_TOPIC = "failed"
"""Topic of the notice that a host posts as soon as it raises an error."""
DONE_TOPIC = "ended"
"""Topic of the notice posted by a host that has finished."""
EXITING_TOPIC = "leaving"
"""Topic of the notice posted by a host that exits alone; the others cannot continue without it and also exit."""
HEARTBEAT_S = 60
"""Seconds without a host's heartbeat after which JAX ends the others; saving to a slow disk may delay a heartbeat."""
COORDINATOR_LINGER_S = 2.0
"""Delay of process 0's exit: when it exits, JAX aborts the others at once."""
COMMON_FAILURE_WINDOW_S = 5.0
"""Time within which all hosts fail if they fail for a common reason."""


def exit_barrier(status_board: StatusBoard) -> None:
    """Waits until every host has arrived; JAX's own barrier at exit times out too early.

    Raises:
        RuntimeError: another host has failed, and this one has not.
    """
    status_board.post(DONE_TOPIC, "")
    while len(status_board.read(DONE_TOPIC)) < status_board.num_hosts:
        failed = status_board.read(FAILED_TOPIC)
        if failed and status_board.host not in failed:
            host, reason = min(failed.items())
            raise RuntimeError(f"host {host} has failed: {reason}")
        time.sleep(POLL_INTERVAL_S / 10)


@contextmanager
def broadcast_failure(status_board: StatusBoard) -> Iterator[None]:
    """Returns a context manager that posts a notice if its block fails, before this host writes its last files."""
    try:
        yield
    except Exception as error:
        status_board.post(FAILED_TOPIC, str(error))
        raise


@contextmanager
def coordinated_shutdown(status_board: StatusBoard, *, enter_phase: Callable[[str], None]) -> Iterator[None]:
    """Returns a context manager: hosts exit together if all of them fail; a host that fails alone exits at once.

    At exit, JAX makes every process wait minutes for all others. If only this host fails, the others are inside a
    collective that needs it, so a notice makes their watchdogs end them with exit code 1.

    A JAX error may mean that another host has died: then the heartbeat ends this host, with exit code 134.

    Args:
        enter_phase: called with the phase `report` before this host waits for the other failing hosts.
    """
    try:
        yield
    except KeyboardInterrupt:
        if status_board.num_hosts > 1:
            _exit_alone(status_board, "interrupted", exit_code=130)
        raise
    except Exception as error:
        if status_board.num_hosts == 1:
            raise
        if _all_hosts_failed(status_board, str(error)):
            enter_phase("report")
            exit_barrier(status_board)
        elif _may_be_peer_death(error):
            atexit.register(_exit_after_delay, 1, HEARTBEAT_S + COMMON_FAILURE_WINDOW_S)
        else:
            _exit_alone(status_board, str(error), exit_code=2 if isinstance(error, InputError) else 1)
        raise


def exit_delay_s(status_board: StatusBoard, *, broadcasts: bool) -> float:
    """Returns how long an exiting host must wait, so that the others can read its notice and exit first.

    Args:
        broadcasts: whether this host has posted a notice.
    """
    if status_board.num_hosts == 1:
        return 0.0
    return COORDINATOR_LINGER_S if status_board.host == 0 else 3 * POLL_INTERVAL_S if broadcasts else 0.0


def _may_be_peer_death(error: Exception) -> bool:
    """Returns whether another host's death may be the cause: a collective failed, or Orbax timed out."""
    if str(error).startswith("RESOURCE_EXHAUSTED"):
        return False
    return isinstance(error, jax.errors.JaxRuntimeError | TimeoutError) or isinstance(
        error.__cause__, jax.errors.JaxRuntimeError
    )


def _exit_alone(status_board: StatusBoard, reason: str, *, exit_code: int) -> None:
    """Makes this process exit after the error is printed and before JAX's own exit handlers run."""
    status_board.post(EXITING_TOPIC, reason)
    atexit.register(_exit_after_delay, exit_code, exit_delay_s(status_board, broadcasts=True))


def _all_hosts_failed(status_board: StatusBoard, reason: str) -> bool:
    """Posts this host's failure, and returns whether all hosts fail within `COMMON_FAILURE_WINDOW_S`."""
    status_board.post(FAILED_TOPIC, reason)
    end = time.monotonic() + COMMON_FAILURE_WINDOW_S
    while len(status_board.read(FAILED_TOPIC)) < status_board.num_hosts:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_INTERVAL_S / 10)
    return True


def _exit_after_delay(exit_code: int, delay_s: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(delay_s)
    os._exit(exit_code)
