"""Kills a run that is mirrored to a bucket over a failing network, and resumes it from the bucket.

A bucket server runs on this machine. Between it and the run, a proxy delays, cuts, resets and stalls connections at
random. The run is killed or gets SIGTERM at a random moment, also while it starts, fetches or ends. Then its disk is
emptied, kept, or kept with a damaged checkpoint, and the same command continues with `--resume auto` until the run is
complete. Finally its weights and metrics are compared bit for bit with those of a run without a bucket, and the next
run starts.

    python scripts/bench/bucket_faults.py s3|gs [--kills 50] [--minutes 60] [--seed 0] [--out FILE]

The exit code is 1 if a run did not continue from a complete checkpoint in the bucket, or if a run ended differently.
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
from contextlib import suppress
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
"""The program, with shorter times until a lease expires after a kill and until a stalled request fails."""
UNREACHABLE = "BucketUnreachableError"


def started(folder: Path, run_dir: str, name: str) -> subprocess.Popen[bytes]:
    """Starts a run, or continues it, with its files and its log in `folder`."""
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
    """Truncates or clears a file of the newest checkpoint on the disk, as a reset of the machine may do."""
    steps = [int(folder.name) for folder in checkpoints.glob("[0-9]*")]
    if steps:
        files = sorted(path for path in (checkpoints / str(max(steps))).rglob("*") if path.is_file())
        path = drawn.choice(files)
        path.write_bytes(bytes(drawn.choice([0, path.stat().st_size])))


def ended(process: subprocess.Popen[bytes], after_s: float, kind: signal.Signals) -> bool:
    """Sends the signal after `after_s` seconds, and returns whether the process was still running then."""
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scheme", choices=("s3", "gs"))
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--minutes", type=float, default=60.0, help="time after which no run is started or continued")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    drawn, found, problems = random.Random(options.seed), Counter[str](), list[str]()
    with bucket_server(options.scheme) as url, tempfile.TemporaryDirectory() as temporary:
        network, place = Network(url, options.seed), Path(temporary)
        span_s = 0.0
        # The first run compiles; the second one shows how long a run without compilation takes.
        for name in ("compiling", "alone"):
            start = time.monotonic()
            if started(place / name, "runs", name).wait(START_S):
                print((place / name / "log").read_text(), file=sys.stderr)
                return 1
            span_s = time.monotonic() - start
        expected = content(place / "alone" / "runs" / "alone")
        end = time.monotonic() + 60.0 * options.minutes
        while found["kills"] + found["SIGTERMs"] < options.kills and time.monotonic() < end:
            name = f"run{found['runs']}"
            bucket, is_complete = Bucket(f"{options.scheme}://bucket/{name}"), False
            while not is_complete and time.monotonic() < end:
                before, folder = newest_complete(bucket), place / "disk"
                disk = drawn.choice(["lost", "lost", "kept", "damaged"])
                found[f"disks {disk}"] += 1
                if disk == "lost":
                    shutil.rmtree(folder, ignore_errors=True)
                elif disk == "damaged":
                    damage(folder / "runs" / options.scheme / "bucket" / name / "checkpoints", drawn)
                network.fault_rate, network.delay_s = drawn.choice([0.0, 0.02, 0.05]), drawn.choice([0.0, 0.02, 0.1])
                kind = drawn.choice([signal.SIGKILL, signal.SIGTERM])
                with reached_at(options.scheme, network.url):
                    process = started(folder, bucket.address.rpartition("/")[0], name)
                stall_s = drawn.choice([0.0, 0.0, 8.0])
                timers = [
                    threading.Timer(after_s, setattr, (network, "is_stalled", after_s == start_s))
                    for start_s in [drawn.uniform(0.0, 2.0 * span_s)]
                    for after_s in (start_s, start_s + stall_s)
                ]
                for timer in timers if stall_s else ():
                    timer.start()
                was_ended = ended(process, drawn.uniform(0.0, 3.0 * span_s), kind)
                for timer in timers if stall_s else ():
                    timer.cancel()
                network.is_stalled = False
                found["SIGTERMs" if kind == signal.SIGTERM else "kills"] += was_ended
                log, code = (folder / "log").read_text(errors="replace"), process.returncode
                fetched = re.search(r"fetched from \S+: step (\d+)", log)
                found["resumes"] += fetched is not None
                is_unreachable = code == 1 and UNREACHABLE in log
                found["starts that the network ended with one error"] += is_unreachable
                is_complete = code == 0
                promised = {0, 75, -signal.SIGTERM} if was_ended and kind == signal.SIGTERM else {0}
                promised |= {1} if is_unreachable else set()
                after = newest_complete(bucket)
                event = kind.name if was_ended else "no signal"
                line = f"{name}: {before} -> {after} in the bucket, disk {disk}, {event}, {code}"
                print(f"{line}{f', fetched {fetched[1]}' if fetched else ''}", flush=True)
                continued = re.search(r"continuing after step (\d+)", log)
                lost = after < before or (continued is not None and int(continued[1]) < before)
                unfetched = disk == "lost" and fetched is None and before >= 0 and (continued or is_complete)
                unexpected = code not in (promised if code >= 0 or kind == signal.SIGTERM else {-signal.SIGKILL})
                for problem, is_there in (
                    ("a complete checkpoint was lost", lost or unfetched),
                    ("a damaged checkpoint was accepted as complete", disk == "lost" and ": damaged (" in log),
                    (f"it ended with {code}", unexpected),
                ):
                    if is_there:
                        problems.append(f"{line}: {problem}")
                        print(f"{problem}\n{log[-6000:]}", file=sys.stderr, flush=True)
            if not is_complete:
                break
            whole = RunDirectory(place / "whole" / name)
            fetch_run(bucket, whole)
            found["runs"] += 1
            is_equal = content(whole.path) == expected
            found["runs equal bit for bit"] += is_equal
            problems += [] if is_equal else [f"{name} differs from an uninterrupted run"]
        found |= {"cuts and resets": network.num_faults, "stalls": network.num_stalls}
        network.close()
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "server": {"s3": "moto", "gs": "gcp-storage-emulator"}[options.scheme],
        "seconds of a run left alone": round(span_s, 1),
        **found,
        "problems": problems,
    }
    text = json.dumps(record, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
