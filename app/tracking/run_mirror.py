"""Mirrors a run to a bucket: its own thread writes the copy during the run, and a resumed run fetches it.

Objects are replaced atomically. A checkpoint counts once its marker, which is written last and has the sizes of all
other objects, is there.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import fsspec

from app.records.run_directory import BEST_LINK, Resume, RunDirectory
from app.records.text_format import format_bytes
from settings.errors import InputError
from settings.schema.run import RunSettings

log = logging.getLogger(__name__)

MARKER = ".complete"
"""Suffix of a checkpoint's marker."""
BEST = f"checkpoints/{BEST_LINK}"
"""Object that contains the step to which the link of this name points."""
LEASE = "lease.json"
RENEW_S, LEASE_S = 10.0, 30.0
"""Seconds between renewals of a lease, and until a lease without renewal expires."""
FINISH_S, STOP_S = 600.0, 25.0
"""Maximum seconds that a finished run waits for its copy, and one that ends by a signal or an error."""
SLOW_S = 5.0
"""Seconds after which a message says that the bucket has not answered yet."""
MAX_DELAY_S = 60.0
"""Maximum wait before the next attempt to write."""
LEFT_OUT = frozenset({".lock", "checkpoints", "wandb"})
"""Files and folders of a run that are mirrored differently or not at all."""
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
"""Package extra for each scheme."""


def bucket_of(run: RunSettings) -> Bucket:
    """Returns the bucket folder to which the settings mirror the run."""
    return Bucket(f"{run.dir.rstrip('/')}/{run.name}")


class Bucket:
    """A folder of a bucket.

    Args:
        option: the setting or option with the address, for errors.

    Raises:
            InputError: the package for this kind of address is not installed.
    """

    def __init__(self, address: str, *, option: str = "run.dir"):
        self.address, self._option = address.rstrip("/"), option
        scheme = address.partition("://")[0]
        try:
            self._files, self._root = fsspec.url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            way = f"pip install 'grpo-jax[{EXTRAS[scheme]}]'"
            raise InputError(f"{option}: {address} cannot be opened ({error}); {way}") from error
        # It logs a traceback for each error that it raises.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

    def check(self, resume: Resume) -> None:
        """Raises InputError if objects cannot be written, read or deleted, or a run exists and `resume` is `never`."""
        probe = f".grpo-{uuid.uuid4().hex}"
        with self._explain_failure("read, written and cleared"):
            self.write(probe, b"probe")
            assert self.read(probe) == b"probe"
            self.delete(probe)
        if resume == "never" and self.has_run:
            raise InputError(
                f"run.name: {self.address} already holds a run; choose another name, or continue it with --resume auto"
            )

    @contextmanager
    def _explain_failure(self, what: str) -> Iterator[None]:
        # The libraries try again for up to a minute.
        timer = threading.Timer(SLOW_S, log.warning, ("%s has not answered yet", self.address))
        timer.start()
        try:
            yield
        # Every exception: each library has its own for a missing bucket, permission or key.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"{self._option}: {self.address} cannot be {what} ({reason}); check that the bucket exists and that "
                "this machine's account has access"
            ) from error
        finally:
            timer.cancel()

    @property
    def has_run(self) -> bool:
        with self._explain_failure("read"):
            return self._files.exists(f"{self._root}/sessions.jsonl")

    def run_names(self, pattern: str) -> list[str]:
        """Returns the names of the matching runs in this folder."""
        with self._explain_failure("read"):
            return [path.split("/")[-2] for path in self._files.glob(f"{self._root}/{pattern}/sessions.jsonl")]

    def sizes(self) -> dict[str, int]:
        """Returns the size of each object by its name in this folder."""
        found = self._files.find(self._root, detail=True)
        return {name[len(self._root) + 1 :]: int(facts["size"]) for name, facts in found.items()}

    def read(self, name: str) -> bytes:
        return self._files.cat_file(f"{self._root}/{name}")

    def write(self, name: str, content: bytes) -> None:
        self._files.pipe_file(f"{self._root}/{name}", content)

    def upload(self, source: Path, name: str) -> None:
        self._files.put_file(str(source), f"{self._root}/{name}")

    def download(self, name: str, target: Path) -> None:
        target.parent.mkdir(parents=True, exist_ok=True)
        self._files.get_file(f"{self._root}/{name}", str(target))

    def delete(self, *names: str) -> None:
        self._files.rm([f"{self._root}/{name}" for name in names])


def complete_steps(bucket: Bucket, sizes: Mapping[str, int]) -> dict[int, list[str]]:
    """Returns the objects of each complete checkpoint by step."""
    found = {}
    for name in sizes:
        step = name.removeprefix("checkpoints/").removesuffix(MARKER)
        if name == f"checkpoints/{step}{MARKER}" and step.isdigit():
            expected = json.loads(bucket.read(name))
            if all(sizes.get(part) == size for part, size in expected.items()):
                found[int(step)] = [part for part in sizes if part.startswith(f"checkpoints/{step}/")]
    return found


def fetch_run(bucket: Bucket, run: RunDirectory) -> str:
    """Fetches a run if its copy has a newer checkpoint than the directory; returns a line about it, or "".

    Small files are fetched first; checkpoints have a temporary name until they are complete.

    Raises:
        InputError: the disk has too little space.
    """
    sizes = bucket.sizes()
    steps = complete_steps(bucket, sizes)
    newest = max(run.checkpoint_steps, default=-1)
    # Lines of steps after the newest checkpoint are only for reports.
    num_bytes = run.metrics_path.stat().st_size if run.metrics_path.exists() else -1
    has_more = (max(steps, default=-1), sizes.get(run.metrics_path.name, -1)) > (newest, num_bytes)
    if not has_more and (run.has_settings or run.sessions_path.name not in sizes):
        return ""
    needed = sum(size for name, size in sizes.items() if not (run.path / name).exists())
    free = shutil.disk_usage(next(parent for parent in run.path.absolute().parents if parent.is_dir())).free
    if needed > free:
        raise InputError(
            f"{bucket.address} takes {format_bytes(needed)}, but only {format_bytes(free)} are free on the disk of "
            f"{run.path}; free some space, or start in another folder"
        )
    for name in sizes:
        if not name.startswith("checkpoints/") and name != LEASE:
            bucket.download(name, run.path / name)
    for step in sorted(steps, reverse=True):
        folder = run.checkpoints_dir / str(step)
        if not folder.exists():
            run.checkpoints_dir.mkdir(parents=True, exist_ok=True)
            partial = run.checkpoints_dir / f".fetched-{step}"
            shutil.rmtree(partial, ignore_errors=True)
            for name in steps[step]:
                bucket.download(name, partial / Path(name).relative_to(f"checkpoints/{step}"))
            partial.rename(folder)
    if BEST in sizes:
        best, link = int(bucket.read(BEST)), run.path / BEST
        with suppress(OSError):  # Some file systems have no links.
            link.unlink(missing_ok=True)
            link.symlink_to(str(best))
    return f"fetched from {bucket.address}: {run.describe_newest_checkpoint()}"


def read_lease(bucket: Bucket) -> dict[str, Any] | None:
    try:
        return json.loads(bucket.read(LEASE))
    except FileNotFoundError:
        return None


def check_lease(bucket: Bucket) -> None:
    """Waits for the lease of a process that died without releasing it to expire.

    Raises:
        InputError: another process is writing the copy.
    """
    end = time.monotonic() + LEASE_S
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
        last = read_lease(bucket)


class LeaseLostError(RuntimeError):
    """Another process has started to write this run."""


class RunMirror:
    """Holds the lease of a run's copy in a bucket and, once started, writes the run's files there.

    A thread writes until the block ends; only the end of the block waits for it. Failed writes are reported and
    retried.

    Raises:
        InputError: another process is writing this run.
    """

    def __init__(self, run: RunDirectory, bucket: Bucket):
        self._run, self._bucket = run, bucket
        self._owner = uuid.uuid4().hex
        self._renewed, self._num_renewals = 0.0, 0
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of the files that are in the bucket, by name."""
        self._begun: set[int] = set()
        self._steps: set[int] = set()
        """Steps whose checkpoints are at least partly in the bucket, and completely."""
        self._best = 0
        """Step of the best checkpoint that the bucket names."""
        self._wake, self._is_ending, self._is_started = threading.Event(), threading.Event(), threading.Event()
        self._problem: LeaseLostError | None = None
        self._behind_since: float | None = None
        self.timeout_s = FINISH_S
        """Maximum time that the end of the block waits for missing files."""
        self._thread = threading.Thread(target=self._work, name="run mirror", daemon=True)

    def __enter__(self) -> RunMirror:
        self._take_lease()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Writes missing files and releases the lease; after the time-out, a warning says what is in the bucket."""
        timeout_s = self.timeout_s if kind is None else min(STOP_S, self.timeout_s)
        self._is_ending.set()
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            newest = max(self._steps, default=None)
            last = "it has no checkpoint there" if newest is None else f"its newest checkpoint there is step {newest}"
            text = "%s is not complete after %g s: %s; --resume auto on this machine completes it"
            log.warning(text, self._bucket.address, timeout_s, last)

    def start(self) -> None:
        """Starts to write; the directory must already have everything from the copy."""
        self._is_started.set()
        self._wake.set()

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
        while self._problem is None:
            self._wake.wait(RENEW_S)
            self._wake.clear()
            is_last = self._is_ending.is_set()
            try:
                self._renew_lease()
                if self._is_started.is_set():
                    self._write_changes()
                if is_last:
                    self._bucket.delete(LEASE)
                    return
            except LeaseLostError as error:
                self._problem = error
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
        self._write_files()
        steps = set(self._run.checkpoint_steps)
        for step in sorted(steps - self._steps, reverse=True):
            self._write_checkpoint(step)
        self._write_best_link()
        for step in sorted(self._begun - steps):
            self._delete_checkpoint(step)
        self._write_files()

    def _write_files(self) -> None:
        for path in self._run.path.rglob("*"):
            name = path.relative_to(self._run.path)
            if name.parts[0] not in LEFT_OUT and path.is_file() and path.suffix != ".partial":
                self._write_file(path, name.as_posix())
        # Progress records are replaced when an interrupted evaluation is completed.
        for step in self._steps:
            for path in (self._run.checkpoints_dir / str(step) / "progress").glob("*"):
                self._write_file(path, path.relative_to(self._run.path).as_posix())

    def _write_file(self, path: Path, name: str) -> None:
        try:
            found = path.stat()
            state = found.st_size, found.st_mtime_ns
            if self._sent.get(name) != state:
                self._bucket.upload(path, name)
                self._sent[name] = state
        except FileNotFoundError:
            if path.exists():
                raise

    def _write_checkpoint(self, step: int) -> None:
        folder = self._run.checkpoints_dir / str(step)
        self._begun.add(step)
        sizes = {}
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            name = path.relative_to(self._run.path).as_posix()
            self._write_file(path, name)
            if not folder.is_dir():  # It has been deleted since, because the run keeps only the newest.
                return
            if path.parent.name != "progress":
                sizes[name] = self._sent[name][0]
            self._renew_lease()
            if self._wake.is_set():  # A step has ended in the meantime: its lines need not wait for the other arrays.
                self._write_files()
        if sizes:
            self._bucket.write(f"checkpoints/{step}{MARKER}", json.dumps(sizes).encode())
            self._steps.add(step)

    def _write_best_link(self) -> None:
        link = self._run.path / BEST
        best = int(os.readlink(link)) if link.is_symlink() else 0
        if best != self._best and best in self._steps:
            self._bucket.write(BEST, str(best).encode())
            self._best = best

    def _delete_checkpoint(self, step: int) -> None:
        if step in self._steps:
            self._bucket.delete(f"checkpoints/{step}{MARKER}")
            self._steps.remove(step)
        if parts := [name for name in self._bucket.sizes() if name.startswith(f"checkpoints/{step}/")]:
            self._bucket.delete(*parts)
        self._begun.remove(step)

    def _take_lease(self) -> None:
        """Takes the lease once an existing one is released or expired."""
        check_lease(self._bucket)
        self._write_lease()
        # If two processes start at once, the later one keeps the lease.
        time.sleep(1.0)
        if (read_lease(self._bucket) or {}).get("owner") != self._owner:
            raise InputError(f"run.dir: another process has started to write {self._bucket.address}; try again later")

    def _renew_lease(self) -> None:
        if time.monotonic() - self._renewed < RENEW_S:
            return
        found = read_lease(self._bucket)
        if found is not None and found["owner"] != self._owner:
            raise LeaseLostError(
                f"another process, on {found.get('host')}, has started to write {self._bucket.address}"
            )
        self._write_lease()

    def _write_lease(self) -> None:
        self._num_renewals += 1
        lease = {"owner": self._owner, "host": socket.gethostname(), "renewals": self._num_renewals}
        self._bucket.write(LEASE, json.dumps(lease).encode())
        self._renewed = time.monotonic()
