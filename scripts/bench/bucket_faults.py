"""Kills a run that is mirrored to a bucket over a failing network, and resumes it from the bucket.

A bucket server runs on this machine. Between it and the run, a proxy delays, cuts, resets and stalls connections at
random. The run is killed or gets SIGTERM at a random moment, also while it starts, downloads or ends. Then its disk
is emptied, kept, or kept with a damaged checkpoint, and the same command continues with `--resume auto` until the run
is complete. Finally its weights and metrics are compared bit for bit with those of a run without a bucket, and the next
run starts.

    python scripts/bench/bucket_faults.py s3|gs [--kills 50] [--minutes 60] [--seed 0] [--out FILE]

The exit code is 1 if a run did not continue from a complete checkpoint in the bucket, or ended with other results.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from app.records.run_directory import RunDirectory  # noqa: E402
from app.tracking.bucket import Bucket, complete_steps, fetch_run  # noqa: E402
from scripts.bench.faults import SETTINGS, START_S, content  # noqa: E402
from tests.program import settings  # noqa: E402
from tests.tracking.buckets import Network, bucket_server, reached_at  # noqa: E402

PROGRAM = (
    "from app.tracking import bucket, run_mirror; bucket.TIMEOUT_S = 5.0; "
    "run_mirror.RENEW_S, run_mirror.LEASE_S = 1.0, 4.0; import cli; cli.main()"
)
"""Runs grpo with shorter time limits for requests and leases, so that trials take less time."""
UNREACHABLE = "BucketUnreachableError"


def started(folder: Path, run_dir: str, name: str) -> subprocess.Popen[bytes]:
    """Starts or continues a run, with its files and its log in `folder`."""
    overrides = (*SETTINGS, f"run.dir={run_dir}", f"run.name={name}", "mesh.cpu_devices=1")
    caching = {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    place = {"PYTHONPATH": str(REPOSITORY), "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "compiled")}
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-c", PROGRAM, "train", "--resume", "auto", *settings(*overrides)],
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu", **caching, **place},
            stdout=log,
            stderr=log,
        )


def newest_complete(bucket: Bucket) -> int:
    return max(complete_steps(bucket, bucket.sizes()), default=-1)


def damage(checkpoints: Path, drawn: random.Random) -> None:
    """Empties a random file of the newest checkpoint or overwrites it with zeros, as a crash of the machine may do."""
    steps = [int(folder.name) for folder in checkpoints.glob("[0-9]*")]
    if steps:
        files = sorted(path for path in (checkpoints / str(max(steps))).rglob("*") if path.is_file())
        path = drawn.choice(files)
        path.write_bytes(bytes(drawn.choice([0, path.stat().st_size])))


def ended(process: subprocess.Popen[bytes], after_s: float, kind: signal.Signals) -> bool:
    """Sends the signal `kind` after `after_s` seconds; returns False if the process ended before."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(after_s)
        return False
    process.send_signal(kind)
    try:
        process.wait(START_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # Python prints the stack of each thread.
        process.wait(START_S)
    return True


@contextmanager
def stalled(network: Network, *, after_s: float, for_s: float) -> Iterator[None]:
    """Stalls the network for `for_s` seconds, `after_s` seconds after the `with` block begins, or until it ends."""
    times = ((after_s, True), (after_s + for_s, False))
    timers = [threading.Timer(at_s, setattr, (network, "is_stalled", value)) for at_s, value in times]
    for timer in timers if for_s else ():
        timer.start()
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        network.is_stalled = False


@dataclass
class Trials:
    """Starts runs in one bucket with random faults, and records the outcomes."""

    scheme: str
    network: Network
    drawn: random.Random
    place: Path
    span_s: float
    """Seconds that a run takes without faults."""
    found: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def start_once(self, bucket: Bucket, name: str) -> bool:
        """Starts or continues a run, ends it at a random moment, and returns whether it is complete."""
        drawn, network, folder, before = self.drawn, self.network, self.place / "disk", newest_complete(bucket)
        disk = drawn.choice(["lost", "lost", "kept", "damaged"])
        self.found[f"disks {disk}"] += 1
        if disk == "lost":
            shutil.rmtree(folder, ignore_errors=True)
        elif disk == "damaged":
            damage(folder / "runs" / self.scheme / "bucket" / name / "checkpoints", drawn)
        network.fault_rate, network.delay_s = drawn.choice([0.0, 0.02, 0.05]), drawn.choice([0.0, 0.02, 0.1])
        kind = drawn.choice([signal.SIGKILL, signal.SIGTERM])
        with reached_at(self.scheme, network.url):
            process = started(folder, bucket.address.rpartition("/")[0], name)
        stall_s = drawn.choice([0.0, 0.0, 8.0])
        with stalled(network, after_s=drawn.uniform(0.0, 2.0 * self.span_s), for_s=stall_s):
            was_ended = ended(process, drawn.uniform(0.0, 3.0 * self.span_s), kind)
        self.found["SIGTERMs" if kind == signal.SIGTERM else "kills"] += was_ended
        log, code = (folder / "log").read_text(errors="replace"), process.returncode
        self._judge(name, log, code, ended_by=kind if was_ended else None, disk=disk, before=before, bucket=bucket)
        return code == 0

    def _judge(
        self,
        name: str,
        log: str,
        code: int,
        *,
        ended_by: signal.Signals | None,
        disk: str,
        before: int,
        bucket: Bucket,
    ) -> None:
        """Prints how a start ended, and adds lost checkpoints and unexpected exit codes to `problems`."""
        fetched = re.search(r"fetched from \S+: step (\d+)", log)
        self.found["resumes"] += fetched is not None
        is_unreachable = code == 1 and UNREACHABLE in log
        self.found["starts that the network ended with one error"] += is_unreachable
        after = newest_complete(bucket)
        event = ended_by.name if ended_by else "no signal"
        line = f"{name}: {before} -> {after} in the bucket, disk {disk}, {event}, {code}"
        print(f"{line}{f', fetched {fetched[1]}' if fetched else ''}", flush=True)
        continued = re.search(r"continuing after step (\d+)", log)
        lost = after < before or (continued is not None and int(continued[1]) < before)
        unfetched = disk == "lost" and fetched is None and before >= 0 and (continued or code == 0)
        promised = {0, 1} if is_unreachable else {0}
        if ended_by is not None:
            promised |= {75, -signal.SIGTERM} if ended_by == signal.SIGTERM else {-signal.SIGKILL}
        for problem, is_there in (
            ("a complete checkpoint was lost", lost or unfetched),
            ("a damaged checkpoint was accepted as complete", disk == "lost" and ": damaged (" in log),
            (f"it ended with {code}", code not in promised),
        ):
            if is_there:
                self.problems.append(f"{line}: {problem}")
                print(f"{problem}\n{log[-6000:]}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheme", choices=("s3", "gs"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which no run is started or continued")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    with bucket_server(options.scheme) as url, tempfile.TemporaryDirectory() as temporary:
        network, place, span_s = Network(url, options.seed), Path(temporary), 0.0
        # The first run compiles; the second one shows how long a run without compilation takes.
        for name in ("compiling", "alone"):
            start = time.monotonic()
            if started(place / name, "runs", name).wait(START_S):
                print((place / name / "log").read_text(), file=sys.stderr)
                return 1
            span_s = time.monotonic() - start
        expected = content(place / "alone" / "runs" / "alone")
        trials = Trials(options.scheme, network, random.Random(options.seed), place, span_s)
        found, end = trials.found, time.monotonic() + 60.0 * options.minutes
        while found["kills"] + found["SIGTERMs"] < options.kills and time.monotonic() < end:
            name = f"run{found['runs']}"
            bucket, is_complete = Bucket(f"{options.scheme}://bucket/{name}"), False
            while not is_complete and time.monotonic() < end:
                is_complete = trials.start_once(bucket, name)
            if not is_complete:
                break
            whole = RunDirectory(place / "whole" / name)
            fetch_run(bucket, whole)
            found["runs"] += 1
            is_equal = content(whole.path) == expected
            found["runs equal bit for bit"] += is_equal
            trials.problems += [] if is_equal else [f"{name} differs from an uninterrupted run"]
        found |= {"cuts and resets": network.num_faults, "stalls": network.num_stalls}
        network.close()
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "server": {"s3": "moto", "gs": "gcp-storage-emulator"}[options.scheme],
        "seconds of a run left alone": round(span_s, 1),
        **found,
        "problems": trials.problems,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return bool(trials.problems)


if __name__ == "__main__":
    sys.exit(main())
