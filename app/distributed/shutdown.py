"""How hosts leave each other, at the end of a run or with an error."""

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
"""The topic under which a host says that it ends with an error, as soon as it knows."""
DONE_TOPIC = "ended"
"""The topic under which a host says that it has nothing left to do."""
EXITING_TOPIC = "leaving"
"""The topic under which a host says that it ends though others go on; they cannot without it, and end, too."""
COORDINATOR_LINGER_S = 2.0
"""So long the first host stays when all end: when it is gone, JAX aborts the others at once."""
COMMON_FAILURE_WINDOW_S = 5.0
"""Hosts that fail for the same reason do so within so many seconds."""


def exit_barrier(status_board: StatusBoard) -> None:
    """Returns when every host has come here, and no sooner: JAX's own wait at the end of a program is a short one.

    Raises:
        RuntimeError: another host has failed meanwhile, and this one has not.
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
    """The other hosts know of an error inside at once, whatever is still to be written here before this one ends."""
    try:
        yield
    except Exception as error:
        status_board.post(FAILED_TOPIC, str(error))
        raise


@contextmanager
def coordinated_shutdown(
    status_board: StatusBoard, *, heartbeat_s: float, enter_phase: Callable[[str], None]
) -> Iterator[None]:
    """Where all hosts fail they end together; where this one fails alone, it will not wait for them.

    JAX has every process wait at its end for all the others, minutes long. Those are in the middle of something that
    they cannot finish without this one, so they are told, and their watchdogs end them with exit code 1.

    What JAX itself raises may come of a host that has died: then the heartbeat ends this one, with exit code 134.

    Args:
        entered: is told that the phase `report` begins, in which this host waits for those that fail, too.
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
    """How long a host that ends at once stays, so that the others hear of what it tells, and can end first."""
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
    """Whether another host's end may have caused it: a collective breaks, or orbax waits for the host in vain."""
    if str(error).startswith("RESOURCE_EXHAUSTED"):
        return False
    return isinstance(error, jax.errors.JaxRuntimeError | TimeoutError) or isinstance(
        error.__cause__, jax.errors.JaxRuntimeError
    )


def _exit_alone(status_board: StatusBoard, reason: str, *, exit_code: int) -> None:
    """At the end of the program, before what JAX has registered, and after the error has been told."""
    status_board.post(EXITING_TOPIC, reason)
    atexit.register(_exit_after_delay, exit_code, exit_delay_s(status_board, broadcasts=True))


def _all_hosts_failed(status_board: StatusBoard, reason: str) -> bool:
    """Whether all hosts have come to an error, a moment later at most."""
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
