"""Reads and writes the copy of a run in a bucket, and fetches it when a run is resumed.

Objects are replaced atomically. A checkpoint is complete if its marker, which is written last, exists, and all objects
have the sizes that it lists.
"""

from __future__ import annotations

import errno
import glob
import json
import logging
import mimetypes
import os
import re
import shutil
import threading
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import fsspec

from app.records.run_directory import BEST_LINK, FETCHED, Resume, RunDirectory
from app.records.text_format import format_bytes
from settings.errors import InputError
from settings.schema.run import RunSettings

log = logging.getLogger(__name__)

MARKER = ".complete"
"""Suffix of a checkpoint's marker, a JSON object with the sizes of all objects of the checkpoint."""
BEST = f"checkpoints/{BEST_LINK}"
"""Object with the step of the best checkpoint; it replaces the link of the run directory, as buckets have no links."""
LEASE = "lease.json"
"""Object that names the process which writes the copy."""
TIMEOUT_S, BYTES_PER_S = 60.0, 1 << 20
"""Time limit of a request: `TIMEOUT_S`, plus the bytes of its content / `BYTES_PER_S`. gcsfs and s3fs have no limit."""
BATCH_BYTES = 256 << 20
"""Approximate bytes per download request; smaller batches have shorter time limits, so stalls are found earlier."""
MULTIPART_BYTES = 5 << 20
"""gcsfs sends a smaller file as a part of a multipart body (RFC 2046), a larger one in resumable chunks."""
OBJECT_BYTES = 1 << 18
"""Bytes that could be downloaded in the time of an object's requests; a batch of small objects takes this for each."""
MAX_FETCHES = 5
"""Maximum number of attempts to fetch a run that deletes checkpoints meanwhile."""
SLOW_S = 5.0
"""Seconds without an answer from the bucket after which a warning is logged."""
EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}
"""Maps the scheme of an address to the pip extra of this package that installs its client library."""


class BucketUnreachableError(RuntimeError):
    """Requests to a bucket kept failing until gcsfs or s3fs gave up retrying."""


class ObjectGoneError(RuntimeError):
    """An object was deleted after it had been listed."""


def bucket_of(run: RunSettings) -> Bucket:
    """Returns the bucket folder of the run: `run.name` in `run.dir`."""
    return Bucket(f"{run.dir.rstrip('/')}/{run.name}")


class Bucket:
    """A folder in a bucket that contains the copy of a run, or a folder for each of several runs.

    Args:
        option: the setting or option that gave the address, for error messages.

    Raises:
        InputError: the package for this kind of address is not installed.
    """

    def __init__(self, address: str, *, option: str = "run.dir"):
        self.address, self.option = address.rstrip("/"), option
        scheme = address.partition("://")[0]
        self._type_option = "ContentType" if scheme == "s3" else "content_type"
        try:
            self._files, self._root = fsspec.url_to_fs(self.address, use_listings_cache=False, skip_instance_cache=True)
        except ImportError as error:
            extra = EXTRAS[scheme]
            raise InputError(
                f"{option}: {address} cannot be opened without the package {extra}fs; run pip install "
                f"'grpo-jax[{extra}]'"
            ) from error
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
                f"run.name: {self.address} already holds a run; choose another run.name, or continue it with --resume "
                "auto"
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
        """Converts exceptions of gcsfs or s3fs in the `with` block to exceptions that name the address.

        Raises:
            BucketUnreachableError: the network or the server failed.
            InputError: any other failure, such as a missing bucket or permission.
        """
        # The libraries try again for up to a minute.
        timer = threading.Timer(SLOW_S, log.warning, ("waiting for %s", self.address))
        timer.start()
        try:
            yield
        except ObjectGoneError:
            raise
        # Every exception: each library has its own for a missing bucket, permission or key.
        except Exception as error:
            kind = type(error).__name__
            text = f"{self.option}: {self.address} cannot be {what} ({' '.join(f'{kind}: {error}'.split())})"
            if _is_network_error(error):
                raise BucketUnreachableError(f"{text}; start again once it can be reached") from error
            raise InputError(
                f"{text}; check that the bucket exists and that this machine's account has access"
            ) from error
        finally:
            timer.cancel()

    def _call(self, method: str, *arguments: Any, num_bytes: int = 0, **options: Any) -> Any:
        limit_s = TIMEOUT_S + num_bytes / BYTES_PER_S
        return getattr(self._files, method)(*arguments, timeout=limit_s, **options)

    @property
    def has_run(self) -> bool:
        with self.explain_failure("read"):
            return self._call("exists", f"{self._root}/sessions.jsonl")

    def run_names(self, pattern: str) -> list[str]:
        """Returns the names of the runs in this folder that match the glob pattern."""
        with self.explain_failure("read"):
            found = self._call("glob", f"{glob.escape(self._root)}/{pattern}/sessions.jsonl")
        return [path.split("/")[-2] for path in found]

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Maps each object in `folder`, as a path relative to this bucket folder, to its size in bytes."""
        found = self._call("find", f"{self._root}/{folder}".rstrip("/"), detail=True)
        sizes = {name[len(self._root) + 1 :]: int(facts["size"]) for name, facts in found.items()}
        # Not the objects `folder/` with which web consoles make folders; and `..` would lead out of the run directory.
        return {name: size for name, size in sizes.items() if {"", ".", ".."}.isdisjoint(name.split("/"))}

    def read(self, name: str) -> bytes:
        return self._call("cat_file", f"{self._root}/{name}")

    def write(self, name: str, content: bytes, *, is_new: bool = False) -> None:
        """Writes an object; with `is_new`, raises FileExistsError instead of replacing an existing one."""
        options: dict[str, Any] = {"mode": "create" if is_new else "overwrite"}
        # A browser shows a report only if its type is known.
        options[self._type_option] = mimetypes.guess_type(name)[0] or "application/octet-stream"
        if _would_be_cut(content):
            options["chunksize"] = len(content)
        self._call("pipe_file", f"{self._root}/{name}", content, num_bytes=len(content), **options)

    def upload(self, source: Path, name: str) -> None:
        """Uploads a file. If it grows meanwhile, its first bytes arrive."""
        num_bytes = source.stat().st_size
        # gcsfs fails if a large file grows while it reads it. Those of checkpoints never do, and may exceed the memory.
        if num_bytes < MULTIPART_BYTES or not name.startswith("checkpoints/"):
            self.write(name, source.read_bytes())
        else:
            self._call("put_file", str(source), f"{self._root}/{name}", num_bytes=num_bytes)

    def download(self, sizes: Mapping[str, int], folder: Path) -> None:
        """Downloads objects into a folder, several at once; `sizes` maps their names to bytes.

        Raises:
            ObjectGoneError: an object has been deleted.
        """
        costs = {name: size + OBJECT_BYTES for name, size in sizes.items()}
        ends = dict(zip(costs, accumulate(costs.values()), strict=True))
        for _, batch in groupby(costs, key=lambda name: ends[name] // BATCH_BYTES):
            names = list(batch)
            sources, targets = [f"{self._root}/{name}" for name in names], [str(folder / name) for name in names]
            for is_last in (False, False, True):
                try:
                    self._call("get", sources, targets, num_bytes=sum(costs[name] for name in names))
                    break
                except FileNotFoundError as error:
                    raise ObjectGoneError(str(error)) from error
                # Every exception, as above; s3fs does not repeat the request for a part of a large object.
                except Exception as error:
                    if is_last or isinstance(error, TimeoutError) or not _is_network_error(error):
                        raise

    def delete(self, *names: str) -> None:
        # Not by `rm`, for which a name with brackets is a pattern, and which hides errors in the case of s3fs.
        for name in names:
            # If an answer is lost, the libraries ask again, and find nothing.
            with suppress(FileNotFoundError):
                self._call("rm_file", f"{self._root}/{name}")


def _is_network_error(error: Exception) -> bool:
    """Returns whether the network failed, or the server was too busy to answer."""
    # The HTTP status in the errors of gcsfs, and the numbers to which s3fs converts it.
    busy = errno.EBUSY, getattr(errno, "EREMOTEIO", errno.EIO)
    if getattr(error, "code", None) in range(500, 600) or getattr(error, "errno", None) in busy:
        return True
    # By name, because each library has its own classes.
    names = "connect|timeout|transport|ClientOSError|ClientPayloadError"
    return re.search(names, type(error).__name__, re.IGNORECASE) is not None


def _would_be_cut(content: bytes) -> bool:
    r"""Returns whether a server can take a part of the content for the end of a multipart body.

    gcsfs ends the content with the line feed and boundary `\n--==0==`. If the content itself ends with `\r`, the line
    end before the boundary reads as `\r\n`, and the server stores one byte less. Resumable chunks have no boundary.
    """
    return content.endswith(b"\r") or b"--==0==" in content


def complete_steps(bucket: Bucket, sizes: Mapping[str, int]) -> dict[int, list[str]]:
    """Maps the step of each complete checkpoint to the names of its objects; `sizes` is `bucket.sizes()`."""
    found = {}
    for name in sizes:
        step = name.removeprefix("checkpoints/").removesuffix(MARKER)
        if name == f"checkpoints/{step}{MARKER}" and step.isdigit():
            with suppress(FileNotFoundError):  # A run that is being trained has deleted it.
                expected = json.loads(bucket.read(name))
                if all(sizes.get(part) == size for part, size in expected.items()):
                    found[int(step)] = [part for part in sizes if part.startswith(f"checkpoints/{step}/")]
    return found


def fetch_run(bucket: Bucket, run: RunDirectory, *, steps: Collection[int] | None = None) -> str:
    """Fetches from the copy what the run directory lacks; returns a line about it, or "" if nothing was fetched.

    Files are fetched before checkpoints. Each appears in the run directory only when it is complete.

    Args:
        steps: the checkpoints to fetch, if they are complete; None fetches the newest and the best, unless the
            directory has a newer one.

    Raises:
        InputError: the copy cannot be fetched, belongs to another run, or needs more space than the disk has free.
        BucketUnreachableError: the network failed.
    """
    for _ in range(MAX_FETCHES):
        # A run that is being trained deletes old checkpoints.
        with suppress(ObjectGoneError):
            return _fetch_once(bucket, run, steps)
    raise InputError(
        f"{bucket.option}: the run in {bucket.address} deletes its checkpoints before they are fetched; fetch it when "
        "it has ended, or raise its checkpoint.keep"
    )


def _fetch_once(bucket: Bucket, run: RunDirectory, steps: Collection[int] | None) -> str:
    sessions, metrics = run.sessions_path.name, run.metrics_path.name
    with bucket.explain_failure("read"):
        sizes = bucket.sizes()
        complete = complete_steps(bucket, sizes)
        is_other = sessions in sizes and run.sessions_path.exists() and not is_same_run(bucket, run)
        best = int(bucket.read(BEST)) if BEST in sizes else None
    if is_other and complete:
        raise InputError(
            f"{bucket.option}: {bucket.address} and {run.path} hold different runs; choose another run.name, or move "
            "one of them away"
        )
    # Without a checkpoint, a run that was started over has replaced it.
    if is_other or sessions not in sizes:
        return ""
    whole = {step for step in run.checkpoint_steps if _is_whole(run, complete.get(step, ()), sizes)}
    newest, newest_here = max(complete, default=-1), max(whole, default=-1)
    is_ahead = newest_here > newest
    wanted = (set() if is_ahead else {newest, best}) if steps is None else {*steps}
    new = sorted(wanted & complete.keys() - whole)
    num_bytes = run.metrics_path.stat().st_size if run.metrics_path.exists() else -1
    has_lines = sizes.get(metrics, -1) > num_bytes
    small = {}
    if not run.has_settings or ((new or has_lines) and not is_ahead):
        names = (name for name in sizes if not name.startswith(("checkpoints/", ".")) and name != LEASE)
        small = {name: sizes[name] for name in names if "/" not in name or not _is_whole(run, [name], sizes)}
    if not small and not new:
        return ""
    parts = {step: {name: sizes[name] for name in complete[step]} for step in new}
    needed = sum(sum(one.values()) for one in (small, *parts.values()))
    _check_space(bucket, run, needed)
    log.info("fetching %s from %s", format_bytes(needed), bucket.address)
    with bucket.explain_failure("fetched"), _fetched(run) as partial:
        bucket.download(small, partial)
        # The sessions first, which mark the directory of a run, and the metrics last, which say that all is there.
        for name in sorted(small, key=lambda name: (name != sessions, name == metrics)):
            (run.path / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(partial / name, run.path / name)
        for step in new:
            bucket.download(parts[step], partial)
            target = run.checkpoints_dir / str(step)
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            (partial / "checkpoints" / str(step)).rename(target)
    if best in run.checkpoint_steps:
        with suppress(OSError):  # Some file systems have no links.
            (run.path / BEST).unlink(missing_ok=True)
            (run.path / BEST).symlink_to(str(best))
    what = "all but its checkpoints" if steps is not None and not steps else run.describe_newest_checkpoint()
    return f"fetched from {bucket.address}: {what}"


def _check_space(bucket: Bucket, run: RunDirectory, num_bytes: int) -> None:
    free = shutil.disk_usage(next(parent for parent in run.path.absolute().parents if parent.is_dir())).free
    if num_bytes > free:
        raise InputError(
            f"{bucket.option}: {bucket.address} takes {format_bytes(num_bytes)}, but only {format_bytes(free)} are "
            f"free on the disk of {run.path}; free some space, or start in another folder"
        )


def is_same_run(bucket: Bucket, run: RunDirectory) -> bool:
    """Returns whether the copy and the directory belong to the same run: their first sessions are equal."""
    first, own = (
        text.partition(b"\n")[0] for text in (bucket.read(run.sessions_path.name), run.sessions_path.read_bytes())
    )
    return first == own


def replace_checkpoint(bucket: Bucket, run: RunDirectory, step: int) -> bool:
    """Renames a damaged checkpoint to `damaged-STEP` and fetches its copy from the bucket.

    Returns False, and changes nothing, if the bucket has no complete copy of the checkpoint.
    """
    with bucket.explain_failure("read"):
        sizes = bucket.sizes()
        parts = complete_steps(bucket, sizes).get(step)
    if parts is None:
        return False
    target, aside = (run.checkpoints_dir / name for name in (str(step), f"damaged-{step}"))
    with bucket.explain_failure("fetched"), _fetched(run) as partial:
        bucket.download({name: sizes[name] for name in parts}, partial)
        shutil.rmtree(aside, ignore_errors=True)
        target.rename(aside)
        (partial / "checkpoints" / str(step)).rename(target)
    return True


@contextmanager
def _fetched(run: RunDirectory) -> Iterator[Path]:
    """Yields a temporary folder in the run directory for incomplete downloads, and deletes it at the end."""
    partial = run.path / FETCHED
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(partial, ignore_errors=True)


def _is_whole(run: RunDirectory, names: Collection[str], sizes: Mapping[str, int]) -> bool:
    """Returns whether the directory has the files with these sizes; progress records are not compared."""
    paths = {name: run.path / name for name in names if "/progress/" not in name}
    return all(path.is_file() and path.stat().st_size == sizes[name] for name, path in paths.items())
