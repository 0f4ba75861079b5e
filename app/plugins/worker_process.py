"""A plug-in's worker process, with its pipes and environment variables."""

from __future__ import annotations

import ctypes
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, TypeVar

from app.plugins.supervisor import KILL_LIMIT_S
from app.plugins.values import replace_control_characters
from settings.errors import InputError
from settings.secrets import redact, redact_also

START_FILE = str(Path(__file__).with_name("start_worker.py"))
SOURCE_ROOT = str(Path(__file__).resolve().parents[2])
"""Folder that contains the `app` package."""

PR_SET_DUMPABLE = 4
"""An option of the Linux call prctl, which Python does not define."""

ALLOWED_ENVIRONMENT = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TEMP", "TMP"),
        *("PYTHONPATH", "PYTHONHOME", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS"),
    }
)
"""Environment variables inherited by workers: an allow-list, so that secrets are never passed on by accident."""

MAX_ANSWER_BYTES = 64 * 2**20
MAX_PRINTED_BYTES = 256 * 2**10
"""Number of bytes of a plug-in's output that are printed during one call; the rest is dropped."""
PIPE_BYTES = 64 * 2**10
"""Usual capacity of a pipe: the most that one read returns."""
MAX_KEY_BYTES = 4 * 2**10
"""Maximum length of a secret that is redacted even if a long line is cut inside it."""


class StderrRelay:
    """Copies the output of a worker to stderr, in whole lines and without control characters."""

    def __init__(self, pipe: int) -> None:
        self.fd = pipe
        self.is_open = True
        self.remaining = MAX_PRINTED_BYTES
        """Number of bytes that may still be printed during the current call."""
        self._line = b""
        """Start of an incomplete line."""

    def read(self) -> None:
        """Prints the available lines without waiting."""
        try:
            data = os.read(self.fd, PIPE_BYTES)
        except BlockingIOError:
            return
        self.is_open = bool(data)
        lines, _, self._line = (self._line + data).rpartition(b"\n")
        self._print(lines)
        if len(self._line) >= PIPE_BYTES:
            # A key at the end may have arrived in part.
            line = redact(self._line.decode(errors="surrogateescape")).encode(errors="surrogateescape")
            self._print(line[:-MAX_KEY_BYTES])
            self._line = line[-MAX_KEY_BYTES:]

    def flush(self) -> None:
        """Prints the rest of the pipe. Reads only once, because an orphaned child of the worker could print forever."""
        self.read()
        self._print(self._line)
        self._line = b""

    def _print(self, data: bytes) -> None:
        if self.remaining <= 0:
            return
        for line in redact(data.decode(errors="replace"))[: self.remaining].splitlines():
            print(replace_control_characters(line.expandtabs()), file=sys.stderr)
        self.remaining -= len(data)
        if self.remaining <= 0:
            print("(a plug-in prints too much; the rest of this call's output is dropped)", file=sys.stderr)


class WorkerProcess:
    """A worker process and its pipes. Of its methods, only `kill` blocks.

    Args:
        program: module whose `main` the process runs.
        environment: all environment variables of the process.
    """

    def __init__(self, program: str, environment: Mapping[str, str]) -> None:
        if sys.platform == "linux":
            # Keep other processes of the same user from reading this one's environment and memory.
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-B", START_FILE, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,
        )
        self.write_fd, self.read_fd, printing = (pipe.fileno() for pipe in self._pipes)
        for pipe in (self.write_fd, self.read_fd, printing):
            os.set_blocking(pipe, False)
        self.stderr_relay = StderrRelay(printing)
        self.outgoing = memoryview(b"")
        self._incoming = b""

    @property
    def _pipes(self) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
        process = self.process
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        return process.stdin, process.stdout, process.stderr

    def send(self, message: Mapping[str, Any]) -> None:
        self.outgoing = memoryview(self.outgoing.tobytes() + json.dumps(message, default=str).encode() + b"\n")
        self.stderr_relay.remaining = MAX_PRINTED_BYTES

    def write(self) -> None:
        """Writes as much as the pipe accepts. If the worker has exited, `read` detects it."""
        try:
            self.outgoing = self.outgoing[os.write(self.write_fd, self.outgoing) :]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self.outgoing = memoryview(b"")

    def read(self) -> list[dict[str, Any]]:
        """Returns the answers that have arrived completely.

        Raises:
            EOFError: the worker has exited, or an answer is invalid.
        """
        data = os.read(self.read_fd, 1 << 20)
        *lines, self._incoming = (self._incoming + data).split(b"\n")
        if not data or len(self._incoming) > MAX_ANSWER_BYTES:
            raise EOFError
        try:
            answers = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise EOFError from None
        if not all(isinstance(answer, dict) for answer in answers):
            raise EOFError
        return answers

    def kill(self) -> int:
        """Kills the process and its descendants; returns its exit code, or the negative number of a signal."""
        if sys.platform == "linux":
            self._end_supervisor()
        # Before `wait`, because afterwards another process could get the same id.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        status = self.process.wait()
        self.stderr_relay.flush()
        for pipe in self._pipes:
            pipe.close()
        return status

    def _end_supervisor(self) -> None:
        """Waits until the supervisor has killed all processes of the plug-in and exited."""
        pid, deadline = self.process.pid, time.monotonic() + KILL_LIMIT_S + 1
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        while time.monotonic() < deadline and os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            time.sleep(0.001)


Worker = TypeVar("Worker", bound=WorkerProcess)


def wait_for_answers(
    workers: Iterable[Worker], *, timeout_s: float, alarm: int
) -> list[tuple[Worker, list[dict[str, Any]] | None]]:
    """Waits for activity on any pipe, at most `timeout_s`; returns each worker that has answered, with its answers.

    The answers are None for a worker that has exited or sent an invalid one. Queued messages are sent, and output of
    workers is printed. A byte at the file descriptor `alarm` also ends the wait.
    """
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            selector.register(worker.read_fd, selectors.EVENT_READ, worker)
            if worker.stderr_relay.is_open:
                selector.register(worker.stderr_relay.fd, selectors.EVENT_READ, worker)
            if worker.outgoing:
                selector.register(worker.write_fd, selectors.EVENT_WRITE, worker)
        selector.register(alarm, selectors.EVENT_READ)
        events = selector.select(None if timeout_s == math.inf else max(timeout_s, 0))
    answered: list[tuple[Worker, list[dict[str, Any]] | None]] = []
    for key, event in events:
        worker: Worker | None = key.data
        if worker is None:
            os.read(key.fd, PIPE_BYTES)
        elif event & selectors.EVENT_WRITE:
            worker.write()
        elif key.fd == worker.stderr_relay.fd:
            worker.stderr_relay.read()
        else:
            try:
                answers = worker.read()
            except EOFError:
                answered.append((worker, None))
            else:
                answered += [(worker, answers)] if answers else []
    return answered


def describe_exit(status: int) -> str:
    """Describes how a process ended; `status` is its exit code, or the negative number of a signal."""
    if status < 0:
        known = {s.value: s.name for s in signal.Signals}
        return f"its process was ended by {known.get(-status, f'signal {-status}')}"
    return f"its process ended with exit code {status}"


def allow_variables(names: Sequence[str]) -> None:
    """Checks that the variables of `plugins.env_vars` are set, and makes `redact` hide their values.

    Raises:
        InputError: a variable is not set.
    """
    for name in names:
        if name not in os.environ:
            raise InputError(
                f"plugins.env_vars: the environment variable {name} is not set; set it, or remove the name"
            )
    redact_also(names)


def worker_environment(names: Sequence[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Returns a worker's environment variables: defaults, and those in `environ` that are allowed or in `names`."""
    allowed = ALLOWED_ENVIRONMENT.union(names)
    passed = {name: value for name, value in environ.items() if name in allowed or name.startswith("LC_")}
    # The program's folder comes last, so that a plug-in imports the user's `app` or `settings` if there are any.
    source_path = {"PYTHONPATH": os.pathsep.join(filter(None, (passed.get("PYTHONPATH"), SOURCE_ROOT)))}
    # Workers already run in parallel, so threads of libraries would only compete. Devices belong to the trainer.
    defaults = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**defaults, **passed, **source_path, "JAX_PLATFORMS": "cpu"}
