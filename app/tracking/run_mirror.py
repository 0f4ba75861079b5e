"""Mirrors a run to a bucket in a background thread."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import socket
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from app.records.run_directory import FETCHED, RunDirectory
from app.tracking.bucket import BEST, LEASE, MARKER, Bucket, complete_steps, is_same_run, replace_checkpoint
from settings.errors import InputError

log = logging.getLogger(__name__)

RENEW_S, LEASE_S = 10.0, 30.0
"""Seconds between renewals of a lease, and seconds after which a lease that is not renewed expires."""
FINISH_S, STOP_S = 600.0, 25.0
"""Time limits in seconds for copying at the end of a finished run, and of a run that a signal or error ended."""
MAX_DELAY_S = 60.0
"""Maximum number of seconds before a failed write is tried again."""
GROWTH_BYTES_PER_S = 1 << 20
"""Maximum average upload rate of a file that keeps changing: each upload sends it whole, so large files wait longer."""
LEFT_OUT = frozenset({".lock", FETCHED, "checkpoints", "wandb"})
"""Files and folders of a run that `_write_files` skips: checkpoints are mirrored separately, the others not at all."""


def read_lease(bucket: Bucket) -> dict[str, Any] | None:
    try:
        return json.loads(bucket.read(LEASE))
    except FileNotFoundError:
        return None


def check_lease(bucket: Bucket) -> dict[str, Any] | None:
    """Returns the expired lease of a process that died without releasing it, or None if there is no lease.

    Waits up to `LEASE_S` to see that the lease is not renewed.

    Raises:
        InputError: another process renews the lease, so it is writing the copy.
        BucketUnreachableError: the network failed.
    """
    end = time.monotonic() + LEASE_S
    with bucket.explain_failure("read"):
        first = last = read_lease(bucket)
    if first is not None:
        log.warning("%s: the last process did not release its lease; waiting up to %g s", bucket.address, LEASE_S)
    while last is not None and time.monotonic() < end:
        if last != first:
            raise InputError(
                f"run.dir: {bucket.address} is being written by another process, on {last.get('host')}; choose another "
                "run.name, or end that one first"
            )
        time.sleep(RENEW_S / 5)
        with bucket.explain_failure("read"):
            last = read_lease(bucket)
    return last


class LeaseLostError(RuntimeError):
    """Another process has taken over the copy of this run in the bucket."""


class RunMirror:
    """Holds the lease of a run's copy in a bucket and, once started, writes the run's files there.

    A thread writes the files; only the end of the `with` block waits for it. Failed writes are logged and retried.
    Another thread renews the lease, because writing a large file may take longer than the lease lasts.

    Raises:
        InputError: another process is writing this run.
    """

    def __init__(self, run: RunDirectory, bucket: Bucket):
        self._run, self._bucket = run, bucket
        self._owner = uuid.uuid4().hex
        self._lease, self._renewed, self._num_renewals = threading.Lock(), 0.0, 0
        self._sent: dict[str, tuple[int, int]] = {}
        """Maps the name of each file to its size and modification time when it was last uploaded."""
        self._due: dict[str, float] = {}
        """Maps the name of a file to the time before which it is not uploaded again."""
        self._begun: set[int] = set()
        """Steps for which the bucket has at least one file of a checkpoint."""
        self._steps: set[int] = set()
        """Steps whose checkpoints are complete in the bucket."""
        self._best = 0
        """Step in the bucket's `BEST` object."""
        self._wake, self._is_ending = threading.Event(), threading.Event()
        self._is_started, self._is_over = threading.Event(), threading.Event()
        self._is_compared = self._is_slow = False
        self._problem: LeaseLostError | None = None
        self._behind_since: float | None = None
        self.timeout_s = FINISH_S
        """Maximum number of seconds that the end of the `with` block waits for missing files."""
        self._thread = threading.Thread(target=self._work, name="run mirror", daemon=True)

    def __enter__(self) -> RunMirror:
        self._take_lease()
        self._thread.start()
        threading.Thread(target=self._keep_lease, name="lease of a run", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Writes missing files and releases the lease; if this takes too long, logs which checkpoint is in the bucket.

        Raises:
            LeaseLostError: another process has started to write this run, and no other error ends the block.
        """
        if self._is_ending.is_set():  # It has already ended.
            return
        timeout_s = self.timeout_s if kind is None else min(STOP_S, self.timeout_s)
        self._is_ending.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            newest = max(self._steps, default=None)
            last = "it has no checkpoint there" if newest is None else f"its newest checkpoint there is step {newest}"
            text = "%s is not complete after %g s: %s; --resume auto on this machine completes it"
            log.warning(text, self._bucket.address, timeout_s, last)
        elif self._problem is not None and kind is None:
            raise self._problem

    def start(self) -> None:
        """Starts to write. Objects that the run directory lacks are deleted, and objects that differ are replaced.

        Fetch and read everything that the run continues from before this call.
        """
        self._is_started.set()
        self._wake.set()

    def replace_checkpoint(self, step: int) -> bool:
        """Replaces a damaged checkpoint in the run directory by its copy; returns False without a complete copy."""
        return replace_checkpoint(self._bucket, self._run, step)

    def request(self) -> None:
        """Tells the thread that files may have changed.

        Raises:
            LeaseLostError: another process has started to write this run.
        """
        if self._problem is not None:
            raise self._problem
        self._wake.set()

    def _work(self) -> None:
        delay = 0.0
        while True:
            self._wake.wait(RENEW_S)
            self._wake.clear()
            is_last = self._is_ending.is_set()
            try:
                self._renew_lease()
                if self._is_started.is_set():
                    self._write_changes()
                if is_last:
                    with self._lease:
                        self._bucket.delete(LEASE)
                        self._is_over.set()
                    return
            except LeaseLostError:
                return
            # Every exception: each library has its own network errors, and the run continues without its copy.
            except Exception as error:
                delay = min(MAX_DELAY_S, 2 * delay or 1.0)
                self._tell_behind(error)
                if is_last:
                    time.sleep(min(delay, 2.0))
                else:
                    self._is_ending.wait(delay)
                self._wake.set()
            else:
                delay = 0.0
                self._tell_caught_up()

    def _tell_behind(self, error: Exception) -> None:
        if self._behind_since is None:
            self._behind_since = time.monotonic()
            text = f"{type(error).__name__}: {error}"
            log.warning(
                "%s cannot be written (%s); the run continues, and writing is retried", self._bucket.address, text
            )

    def _tell_caught_up(self) -> None:
        if self._behind_since is not None:
            log.warning(
                "%s can be written again, after %.0f s", self._bucket.address, time.monotonic() - self._behind_since
            )
            self._behind_since = None

    def _write_changes(self) -> None:
        if not self._is_compared:
            self._compare()
        self._write_files(everything=self._is_ending.is_set())
        steps = set(self._run.checkpoint_steps)
        new = sorted(steps - self._steps, reverse=True)
        for step in new:
            self._write_checkpoint(step)
        self._write_best_link()
        for step in sorted(self._begun - steps):
            self._delete_checkpoint(step)
        if new:
            self._write_files(everything=self._is_ending.is_set())

    def _compare(self) -> None:
        """Records which files the bucket already has; deletes the copy if it belongs to another run."""
        sizes = self._bucket.sizes()
        # A run that was started over, without a checkpoint, has nothing in common with its copy.
        if self._run.sessions_path.name in sizes and not is_same_run(self._bucket, self._run):
            self._bucket.delete(*sizes.keys() - {LEASE})
            sizes = {}
        equal = {name: state for name, size in sizes.items() if (state := _state_of(self._run.path / name))[0] == size}
        steps = complete_steps(self._bucket, sizes).items()
        whole = {step: parts for step, parts in steps if all(part in equal for part in parts)}
        self._steps = set(whole)
        self._begun = {int(match[1]) for name in sizes if (match := re.match(r"checkpoints/(\d+)[./]", name))}
        # Despite equal sizes, lines of another session or files of another checkpoint of the same step may differ.
        written_once = {name for name in sizes if "/" in name and not name.startswith("checkpoints/")}
        self._sent = {name: equal[name] for name in written_once.union(*whole.values()) & equal.keys()}
        self._is_compared = True

    def _write_files(self, *, everything: bool) -> None:
        """Writes files that have changed; with `everything`, even files that are not due yet."""
        root = str(self._run.path)
        for folder, children, names in os.walk(root):
            prefix = folder[len(root) + 1 :]
            if not prefix:
                children[:] = {*children} - LEFT_OUT
            for name in {*names} - LEFT_OUT:
                # No `Path`, as a long run has many files.
                name = f"{prefix}/{name}" if prefix else name
                if not name.endswith(".partial") and (everything or time.monotonic() >= self._due.get(name, 0.0)):
                    self._write_file(f"{root}/{name}", name)
        # Progress records are replaced when an interrupted evaluation is completed.
        for step in self._steps:
            for path in (self._run.checkpoints_dir / str(step) / "progress").glob("*"):
                self._write_file(path, path.relative_to(self._run.path).as_posix())

    def _write_file(self, path: Path | str, name: str) -> None:
        self._renew_lease()
        state = _state_of(path)
        if state != _ABSENT and self._sent.get(name) != state:
            try:
                self._bucket.upload(Path(path), name)
                self._sent[name] = state
                self._due[name] = time.monotonic() + state[0] / GROWTH_BYTES_PER_S
            except FileNotFoundError:
                if os.path.exists(path):
                    raise

    def _write_checkpoint(self, step: int) -> None:
        folder, copied = self._run.checkpoints_dir / str(step), self._run.checkpoints_dir / ".copied"
        newest, start = max(self._run.checkpoint_steps, default=0), time.monotonic()
        # Linked files outlive their checkpoint: the run keeps only a few, and might delete each before it is copied.
        shutil.rmtree(copied, ignore_errors=True)
        try:
            shutil.copytree(folder, copied, copy_function=_link)
        except OSError:
            if folder.is_dir():
                raise
            return
        is_newest = step == max(self._run.checkpoint_steps, default=0)
        self._begun.add(step)
        # A checkpoint needs the lines of all steps before it.
        self._write_files(everything=True)
        marker = f"checkpoints/{step}{MARKER}"
        self._bucket.delete(marker)
        paths = sorted(path for path in copied.rglob("*") if path.is_file())
        for path in paths:
            self._write_file(path, f"checkpoints/{step}/{path.relative_to(copied).as_posix()}")
            if self._wake.is_set() and not self._is_ending.is_set():
                # A step has ended in the meantime: its lines are written before the other arrays.
                self._wake.clear()
                if self._is_ending.is_set():  # It may have been set just before.
                    self._wake.set()
                self._write_files(everything=False)
        # A checkpoint that was already being deleted may lack links; the newest is never deleted.
        if is_newest or all((folder / path.relative_to(copied)).exists() for path in paths):
            sizes = {
                f"checkpoints/{step}/{path.relative_to(copied).as_posix()}": path.stat().st_size
                for path in paths
                if path.parent.name != "progress"
            }
            stored = self._bucket.sizes(f"checkpoints/{step}")
            if missing := [name for name, size in sizes.items() if stored.get(name) != size]:
                for name in missing:
                    self._sent.pop(name, None)
                raise OSError(f"{', '.join(missing)}: not stored whole")
            self._bucket.write(marker, json.dumps(sizes).encode())
            self._steps.add(step)
        shutil.rmtree(copied, ignore_errors=True)
        if max(self._run.checkpoint_steps, default=0) > newest and not self._is_slow:
            self._is_slow = True
            log.warning(
                "%s falls behind: the checkpoint of step %d took %.0f s to copy, and the run has saved another one "
                "meanwhile; the next copy is always of the newest checkpoint",
                *(self._bucket.address, step, time.monotonic() - start),
            )

    def _write_best_link(self) -> None:
        link = self._run.path / BEST
        best = int(os.readlink(link)) if link.is_symlink() else 0
        if best != self._best and best in self._steps:
            self._bucket.write(BEST, str(best).encode())
            self._best = best

    def _delete_checkpoint(self, step: int) -> None:
        self._renew_lease()
        self._bucket.delete(f"checkpoints/{step}{MARKER}")
        self._steps.discard(step)
        if parts := self._bucket.sizes(f"checkpoints/{step}"):
            self._bucket.delete(*parts)
        self._begun.remove(step)

    def _take_lease(self) -> None:
        is_expired = check_lease(self._bucket) is not None
        with self._bucket.explain_failure("written"):
            with suppress(FileExistsError):
                self._write_lease(is_new=not is_expired)
            # If two processes replace an expired lease at once, the later one keeps it.
            time.sleep(1.0)
            owner = (read_lease(self._bucket) or {}).get("owner")
        if owner != self._owner:
            way_out = "choose another run.name, or end that process first"
            raise InputError(f"run.dir: another process has started to write {self._bucket.address}; {way_out}")

    def _keep_lease(self) -> None:
        while self._problem is None and not self._is_over.wait(RENEW_S / 2):
            with suppress(Exception):  # Every exception: the thread that writes reports it.
                self._renew_lease()

    def _renew_lease(self) -> None:
        """Renews the lease if `RENEW_S` have passed. Raises LeaseLostError if another process has taken it."""
        with self._lease:
            if self._problem is not None:
                raise self._problem
            if time.monotonic() - self._renewed < RENEW_S or self._is_over.is_set():
                return
            found = read_lease(self._bucket)
            if found is None or found["owner"] != self._owner:
                where, what = self._bucket.address, "has written" if found is None else "has started to write"
                on = "" if found is None else f", on {found.get('host')},"
                way_out = "end one of them, or choose another run.name"
                self._problem = LeaseLostError(f"run.dir: another process{on} {what} {where}; {way_out}")
                raise self._problem
            self._write_lease()

    def _write_lease(self, *, is_new: bool = False) -> None:
        self._num_renewals += 1
        lease = {"owner": self._owner, "host": socket.gethostname(), "renewals": self._num_renewals}
        self._bucket.write(LEASE, json.dumps(lease).encode(), is_new=is_new)
        self._renewed = time.monotonic()


_ABSENT = (-1, -1)


def _state_of(path: Path | str) -> tuple[int, int]:
    """Returns the size and the modification time of a file; (-1, -1) if it does not exist."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return _ABSENT
    return found.st_size, found.st_mtime_ns


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # Some file systems have no links.
        shutil.copy2(source, target)
