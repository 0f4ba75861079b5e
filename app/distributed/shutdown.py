"""How hosts leave each other, at the end of a run or with an error."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import jax

from app.distributed.status_board import POLL_S, Bulletin
from settings.errors import InputError

FAILED = "failed"
"""The topic under which a host says that it ends with an error, as soon as it knows."""
ENDED = "ended"
"""The topic under which a host says that it has nothing left to do."""
LEAVING = "leaving"
"""The topic under which a host says that it ends though others go on; they cannot without it, and end, too."""
LAST_S = 2.0
"""So long the first host stays when all end: when it is gone, JAX aborts the others at once."""
MET_S = 5.0
"""Hosts that fail for the same reason do so within so many seconds."""


def meet(bulletin: Bulletin) -> None:
    """Returns when every host has come here, and no sooner: JAX's own wait at the end of a program is a short one.

    Raises:
        RuntimeError: another host has failed meanwhile, and this one has not.
    """
    bulletin.post(ENDED, "")
    while len(bulletin.read(ENDED)) < bulletin.num_hosts:
        failed = bulletin.read(FAILED)
        if failed and bulletin.host not in failed:
            host, reason = min(failed.items())
            raise RuntimeError(f"host {host} has failed: {reason}")
        time.sleep(POLL_S / 10)


@contextmanager
def telling(bulletin: Bulletin) -> Iterator[None]:
    """The other hosts know of an error inside at once, whatever is still to be written here before this one ends."""
    try:
        yield
    except Exception as error:
        bulletin.post(FAILED, str(error))
        raise


@contextmanager
def parting(bulletin: Bulletin, *, heartbeat_s: float, entered: Callable[[str], None]) -> Iterator[None]:
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
        if bulletin.num_hosts > 1:
            _leave_alone(bulletin, "interrupted", exit_code=130)
        raise
    except Exception as error:
        if bulletin.num_hosts > 1:
            _part(bulletin, error, heartbeat_s=heartbeat_s, entered=entered)
        raise


def parting_s(bulletin: Bulletin, *, tells: bool) -> float:
    """How long a host that ends at once stays, so that the others hear of what it tells, and can end first."""
    if bulletin.num_hosts == 1:
        return 0.0
    return LAST_S if bulletin.host == 0 else 3 * POLL_S if tells else 0.0


def _part(bulletin: Bulletin, error: Exception, *, heartbeat_s: float, entered: Callable[[str], None]) -> None:
    if _all_fail(bulletin, str(error)):
        entered("report")
        meet(bulletin)
    elif _may_be_of_a_death(error):
        atexit.register(_leave, 1, heartbeat_s + MET_S)
    else:
        _leave_alone(bulletin, str(error), exit_code=2 if isinstance(error, InputError) else 1)


def _may_be_of_a_death(error: Exception) -> bool:
    """Whether another host's end may have caused it: a collective breaks, or orbax waits for the host in vain."""
    if str(error).startswith("RESOURCE_EXHAUSTED"):
        return False
    return isinstance(error, jax.errors.JaxRuntimeError | TimeoutError) or isinstance(
        error.__cause__, jax.errors.JaxRuntimeError
    )


def _leave_alone(bulletin: Bulletin, reason: str, *, exit_code: int) -> None:
    """At the end of the program, before what JAX has registered, and after the error has been told."""
    bulletin.post(LEAVING, reason)
    atexit.register(_leave, exit_code, parting_s(bulletin, tells=True))


def _all_fail(bulletin: Bulletin, reason: str) -> bool:
    """Whether all hosts have come to an error, a moment later at most."""
    bulletin.post(FAILED, reason)
    end = time.monotonic() + MET_S
    while len(bulletin.read(FAILED)) < bulletin.num_hosts:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S / 10)
    return True


def _leave(exit_code: int, patience_s: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(patience_s)
    os._exit(exit_code)
