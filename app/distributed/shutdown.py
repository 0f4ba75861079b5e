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
"""Topic of a host that ends with an error, posted as soon as it is raised."""
DONE_TOPIC = "ended"
"""Topic of a host that has finished."""
EXITING_TOPIC = "leaving"
"""Topic of a host that exits alone; the others cannot continue without it and exit, too."""
COORDINATOR_LINGER_S = 2.0
"""Time for which the first host stays at the end: when it exits, JAX aborts the others at once."""
COMMON_FAILURE_WINDOW_S = 5.0
"""Time within which hosts fail if they fail for the same reason."""


def exit_barrier(status_board: StatusBoard) -> None:
    """Returns when every host has arrived; the wait that JAX has at exit is too short.

    Raises:
        RuntimeError: another host has failed in the meantime, and this one has not.
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
    """Posts an error of the block to the other hosts at once, before this host writes its last files."""
    try:
        yield
    except Exception as error:
        status_board.post(FAILED_TOPIC, str(error))
        raise


@contextmanager
def coordinated_shutdown(
    status_board: StatusBoard, *, heartbeat_s: float, enter_phase: Callable[[str], None]
) -> Iterator[None]:
    """Makes hosts that all fail exit together, and a host that fails alone exit without waiting.

    At exit, JAX makes every process wait minutes for all others. Those are inside a collective that needs this host, so
    a notice makes their watchdogs end them with exit code 1.

    An error of JAX itself may be caused by a host that has died: then the heartbeat ends this one, with exit code 134.

    Args:
        enter_phase: is called with the phase `report`, in which this host waits for others that fail.
    """
    try:
        yield
    except KeyboardInterrupt:
        if status_board.num_hosts > 1:
            _exit_alone(status_board, "interrupted", exit_code=130)
        raise
    except Exception as error:
        if status_board.num_hosts > 1:
            _exit_after_error(status_board, error, heartbeat_s=heartbeat_s, enter_phase=enter_phase)
        raise


def exit_delay_s(status_board: StatusBoard, *, broadcasts: bool) -> float:
    """Returns how long a host that exits at once stays, so that the others can read its notice and exit first."""
    if status_board.num_hosts == 1:
        return 0.0
    return COORDINATOR_LINGER_S if status_board.host == 0 else 3 * POLL_INTERVAL_S if broadcasts else 0.0


def _exit_after_error(
    status_board: StatusBoard, error: Exception, *, heartbeat_s: float, enter_phase: Callable[[str], None]
) -> None:
    if _all_hosts_failed(status_board, str(error)):
        enter_phase("report")
        exit_barrier(status_board)
    elif _may_be_peer_death(error):
        atexit.register(_exit_after_delay, 1, heartbeat_s + COMMON_FAILURE_WINDOW_S)
    else:
        _exit_alone(status_board, str(error), exit_code=2 if isinstance(error, InputError) else 1)


def _may_be_peer_death(error: Exception) -> bool:
    """Returns whether another host's death may be the cause: a broken collective, or a time-out of orbax."""
    if str(error).startswith("RESOURCE_EXHAUSTED"):
        return False
    return isinstance(error, jax.errors.JaxRuntimeError | TimeoutError) or isinstance(
        error.__cause__, jax.errors.JaxRuntimeError
    )


def _exit_alone(status_board: StatusBoard, reason: str, *, exit_code: int) -> None:
    """Exits at the end of the program, before JAX's own exit handlers and after the error is printed."""
    status_board.post(EXITING_TOPIC, reason)
    atexit.register(_exit_after_delay, exit_code, exit_delay_s(status_board, broadcasts=True))


def _all_hosts_failed(status_board: StatusBoard, reason: str) -> bool:
    """Returns whether all hosts fail, at most a moment later."""
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
