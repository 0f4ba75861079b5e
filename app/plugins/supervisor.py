"""Contains a worker with a supervising process and a memory limit.

On Linux a worker consists of two processes: the first supervises, the second runs the plug-in. Orphaned descendants
become children of the supervisor, so that daemons started by the plug-in end with the worker. The supervisor itself
ends with the trainer, even if the plug-in blocks all threads of its process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of the Linux call prctl, which Python does not define."""
KILL_LIMIT_S = 10


def supervise() -> None:
    """Forks and returns in the child. When the child exits, the parent kills all other descendants and exits likewise.

    The parent kills the child on SIGTERM, and when the trainer or the thread that started the worker ends. Only Linux
    can reassign orphans to an ancestor (subreaper), so other systems have no supervisor.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform != "linux":
        return
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    child = os.fork()
    if child:
        _end_like(child)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end_like(child: int) -> NoReturn:
    """Waits for the child, kills its descendants, then ends with the child's exit code or signal."""
    # Only the child may hold the pipes, so that the trainer notices its end.
    os.close(0)
    os.close(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    # Keep it as a zombie, so that the handler cannot kill another process with the same id.
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    kill_children()
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler to reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def kill_children() -> None:
    """Kills all children, including orphans that become children, until none are left or 10 s have passed."""
    deadline = time.monotonic() + KILL_LIMIT_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError, ValueError):
                if int(stat.read_text().rpartition(") ")[2].split()[1]) == os.getpid():
                    os.kill(int(stat.parent.name), signal.SIGKILL)
        time.sleep(0.001)


def end_worker() -> NoReturn:
    """Exits, so that the supervisor kills all descendants; without a supervisor, kills the process group."""
    if sys.platform != "linux" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def limit_memory(num_bytes: int) -> list[str]:
    """Limits the address space of this process; returns `["memory"]` if the system cannot do so, else `[]`."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    ceiling = num_bytes if hard == resource.RLIM_INFINITY else min(num_bytes, hard)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
    except (ValueError, OSError):  # macOS
        return ["memory"]
    return []
