"""How a host that fails leaves the others."""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax

from app.mesh.bulletin import POLL_S, Bulletin
from settings.errors import InputError

FAILED = "failed"
"""The topic under which a host says that it ends with an error."""
MET_S = 5.0
"""Hosts that fail for the same reason do so within so many seconds."""


@contextmanager
def parting(bulletin: Bulletin, *, heartbeat_s: float) -> Iterator[None]:
    """Where this host fails and the others do not, it will not wait for them when the program ends.

    JAX has every process wait at its end for all the others, minutes long. Those are in the middle of something that
    they cannot finish without this one; once it is gone, their heartbeat ends them.

    What JAX itself raises may come of a host that has died: then the heartbeat ends this one, too, with exit code 134.
    """
    try:
        yield
    except Exception as error:
        if bulletin.num_hosts > 1 and not _all_fail(bulletin, str(error)):
            # Runs before what JAX has registered, and after the error has been told.
            patience_s = heartbeat_s + MET_S if isinstance(error, jax.errors.JaxRuntimeError) else 0.0
            atexit.register(_leave, 2 if isinstance(error, InputError) else 1, patience_s)
        raise


def _all_fail(bulletin: Bulletin, reason: str) -> bool:
    """Whether all hosts have come to an error, a moment later at most."""
    bulletin.post(FAILED, reason)
    end = time.monotonic() + MET_S
    while len(bulletin.read(FAILED)) < bulletin.num_hosts:
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S / 10)
    # The others are to read this, too, before the one that keeps it is gone.
    time.sleep(2 * POLL_S)
    return True


def _leave(exit_code: int, patience_s: float) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(patience_s)
    os._exit(exit_code)
