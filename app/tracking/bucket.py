"""The copy of a run in a bucket: what it contains, and how a resumed run fetches it.

Objects are replaced atomically. A checkpoint counts as complete once its marker exists, which is written last and lists
the sizes of all other objects.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import fsspec

from app.records.run_directory import BEST_LINK, Resume, RunDirectory
from app.records.text_format import format_bytes
from settings.errors import InputError
from settings.schema.run import RunSettings

log = logging.getLogger(__name__)

MARKER = ".complete"
"""Suffix of a checkpoint's marker."""
BEST = f"checkpoints/{BEST_LINK}"
"""Object that stands for the link to the best checkpoint, as buckets have no links; contains the checkpoint's step."""
LEASE = "lease.json"
"""Object that names the process that writes the copy."""
SLOW_S = 5.0
"""Seconds after which a message says that the bucket has not answered yet."""
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
        self.address, self.option = address.rstrip("/"), option
        scheme = address.partition("://")[0]
        try:
            self._files, self._root = fsspec.url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            way = f"pip install 'grpo-jax[{EXTRAS[scheme]}]'"
            raise InputError(f"{option}: {address} cannot be opened ({error}); {way}") from error
        # It logs a traceback for each error that it raises.
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

    def check(self, resume: Resume, run: RunDirectory) -> None:
        """Checks that the run may be mirrored here.

        Raises:
            InputError: objects cannot be written, read or deleted; a copy exists but `resume` is `never`; or `resume`
                is `must` but neither the copy nor the run has a complete checkpoint.
        """
        probe = f".grpo-{uuid.uuid4().hex}"
        with self.explain_failure("read, written and cleared"):
            self.write(probe, b"probe")
            self.read(probe)
            self.delete(probe)
        if resume == "never" and self.has_run:
            raise InputError(
                f"run.name: {self.address} already holds a run; choose another name, or continue it with --resume auto"
            )
        if resume == "must" and not run.has_checkpoint:
            with self.explain_failure("read"):
                steps = complete_steps(self, self.sizes())
            if not steps:
                raise InputError(
                    f"--resume must: neither {run.path} nor {self.address} has a complete checkpoint; use --resume "
                    "auto to start there"
                )

    @contextmanager
    def explain_failure(self, what: str) -> Iterator[None]:
        # The libraries try again for up to a minute.
        timer = threading.Timer(SLOW_S, log.warning, ("waiting for %s", self.address))
        timer.start()
        try:
            yield
        # Every exception: each library has its own for a missing bucket, permission or key.
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise InputError(
                f"{self.option}: {self.address} cannot be {what} ({reason}); check that the bucket exists and that "
                "this machine's account has access"
            ) from error
        finally:
            timer.cancel()

    @property
    def has_run(self) -> bool:
        with self.explain_failure("read"):
            return self._files.exists(f"{self._root}/sessions.jsonl")

    def run_names(self, pattern: str) -> list[str]:
        """Returns the names of the matching runs in this folder."""
        with self.explain_failure("read"):
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

    def download(self, names: Iterable[str], folder: Path) -> None:
        for name in names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            self._files.get_file(f"{self._root}/{name}", str(folder / name))

    def delete(self, *names: str) -> None:
        # After a lost response, the libraries repeat the request and find no object.
        with suppress(FileNotFoundError):
            self._files.rm([f"{self._root}/{name}" for name in names])


def complete_steps(bucket: Bucket, sizes: Mapping[str, int]) -> dict[int, list[str]]:
    """Returns the objects of each complete checkpoint by step."""
    found = {}
    for name in sizes:
        step = name.removeprefix("checkpoints/").removesuffix(MARKER)
        if name == f"checkpoints/{step}{MARKER}" and step.isdigit():
            with suppress(FileNotFoundError):  # The run, still in progress, has deleted it.
                expected = json.loads(bucket.read(name))
                if all(sizes.get(part) == size for part, size in expected.items()):
                    found[int(step)] = [part for part in sizes if part.startswith(f"checkpoints/{step}/")]
    return found


def fetch_run(bucket: Bucket, run: RunDirectory, *, has_checkpoints: bool = True) -> str:
    """Fetches a run if its copy contains more than the directory; returns a message about it, or "".

    Small files are fetched first and the newest checkpoint last: if it exists locally, the copy is complete.

    Args:
        has_checkpoints: whether checkpoints are fetched.

    Raises:
        InputError: the copy cannot be fetched, belongs to another run, or does not fit on the disk.
    """
    sessions, newest = run.sessions_path.name, max(run.checkpoint_steps, default=-1) if has_checkpoints else -1
    with bucket.explain_failure("read"):
        sizes = bucket.sizes()
        steps = complete_steps(bucket, sizes) if has_checkpoints else {}
        starts = [bucket.read(sessions)] if sessions in sizes and steps and newest >= 0 else []
    starts += [run.sessions_path.read_bytes()] if run.sessions_path.exists() else []
    if len({start.partition(b"\n")[0] for start in starts}) > 1:
        raise InputError(
            f"{bucket.option}: {bucket.address} and {run.path} hold different runs; choose another run.name, or move "
            "one of them away"
        )
    # Lines of steps after the newest checkpoint are only for reports.
    num_bytes = run.metrics_path.stat().st_size if run.metrics_path.exists() else -1
    has_more = (max(steps, default=-1), sizes.get(run.metrics_path.name, -1)) > (newest, num_bytes)
    if not has_more and (run.has_settings or sessions not in sizes):
        return ""
    new = [step for step in sorted(steps) if not (run.checkpoints_dir / str(step)).exists()]
    small = [name for name in sizes if not name.startswith(("checkpoints/", ".")) and name != LEASE]
    needed = sum(
        sizes[name] for name in (*small, *chain(*(steps[step] for step in new))) if not (run.path / name).exists()
    )
    free = shutil.disk_usage(next(parent for parent in run.path.absolute().parents if parent.is_dir())).free
    if needed > free:
        raise InputError(
            f"{bucket.address} takes {format_bytes(needed)}, but only {format_bytes(free)} are free on the disk of "
            f"{run.path}; free some space, or start in another folder"
        )
    log.info("fetching %s from %s", format_bytes(needed), bucket.address)
    with bucket.explain_failure("fetched"):
        for name in small:
            with suppress(FileNotFoundError):  # The run, still in progress, has deleted it.
                bucket.download([name], run.path)
        partial = run.checkpoints_dir / ".fetched"
        for step in new:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(FileNotFoundError):
                bucket.download(steps[step], partial)
                (partial / "checkpoints" / str(step)).rename(run.checkpoints_dir / str(step))
        if BEST in sizes and has_checkpoints:
            best, link = int(bucket.read(BEST)), run.path / BEST
            with suppress(OSError):  # Some file systems have no links.
                link.unlink(missing_ok=True)
                link.symlink_to(str(best))
    what = run.describe_newest_checkpoint() if has_checkpoints else "all but its checkpoints"
    return f"fetched from {bucket.address}: {what}"
