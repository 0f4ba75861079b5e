"""Measures checkpoints on two processes with the run in a shared folder, in a folder of process 0, or in a bucket.

In each case the script trains some steps with a checkpoint after every second step, and resumes. Memory is the maximum
that a process adds during a save or a restore. A server on this machine provides the bucket.

    python scripts/bench/run_folders.py [--model DIR] [--steps 4] [--set a.b=c ...] [--out FILE]
"""

from __future__ import annotations

import argparse
import atexit
import functools
import json
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from scripts.bench.faults import SETTINGS, free_address  # noqa: E402
from tests.program import metrics_of, settings, started  # noqa: E402
from tests.tracking.buckets import bucket_server  # noqa: E402

START = "import scripts.bench.run_folders as measured; measured.measure(); import cli; cli.main()"


def memory_bytes() -> int:
    """Returns the resident memory of this process without pages of files and shared memory."""
    _, resident, of_files, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - of_files) * 4096


def measure() -> None:
    """Patches the methods that save, restore and copy checkpoints to measure them, and prints the figures at exit."""
    from app.checkpoint.checkpoints import Checkpoints
    from app.tracking.bucket import Bucket
    from app.tracking.run_mirror import RunMirror

    figures: dict[str, list[float]] = defaultdict(list)

    def watched(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def timed(*arguments: Any, **options: Any) -> Any:
            before, over = memory_bytes(), threading.Event()
            peak = [before]

            def watch() -> None:
                while not over.wait(0.005):
                    peak.append(max(peak.pop(), memory_bytes()))

            thread = threading.Thread(target=watch)
            thread.start()
            start = time.perf_counter()
            try:
                return call(*arguments, **options)
            finally:
                figures[f"{name}_s"].append(time.perf_counter() - start)
                over.set()
                thread.join()
                figures[f"{name}_mib"].append((peak[0] - before) / 2**20)

        return timed

    for name in ("save", "finish", "restore"):
        setattr(Checkpoints, name, watched(name, getattr(Checkpoints, name)))
    request, upload = RunMirror.request, Bucket.upload

    def timed_request(mirror: RunMirror) -> None:
        start = time.perf_counter()
        request(mirror)
        figures["wait_s"].append(time.perf_counter() - start)

    def counted_upload(bucket: Bucket, source: Path, name: str) -> None:
        figures["checkpoint_bytes" if name.startswith("checkpoints/") else "line_bytes"].append(source.stat().st_size)
        upload(bucket, source, name)

    setattr(RunMirror, "request", timed_request)  # noqa: B010
    setattr(Bucket, "upload", counted_upload)  # noqa: B010
    atexit.register(lambda: print(f"FIGURES {json.dumps(figures)}", flush=True))


def trained(folder: Path, name: str, chosen: list[str], *, steps: int, separate: bool) -> list[dict[str, Any]]:
    """Trains or resumes a run on two processes, and returns the figures of each process."""
    address, hosts = free_address(), []
    blind = f"from tests.two_hosts import hide; hide({str(folder / 'runs')!r}); " if separate else ""
    overrides = (*SETTINGS, "eval.every_steps=0", "checkpoint.best_metric=null", "checkpoint.every_steps=2", *chosen)
    with ExitStack() as stack:
        for host in range(2):
            mesh = ("mesh.cpu_devices=1", f"mesh.coordinator_address={address}", "mesh.num_processes=2")
            own = (f"run.name={name}", f"run.steps={steps}", *mesh, f"mesh.process_id={host}")
            program = "-c", f"{blind if host else ''}{START}"
            arguments = ("train", "--resume", "auto", *settings(*overrides, *own))
            hosts.append(stack.enter_context(started(*arguments, cwd=folder, program=program)))
        texts = [host.communicate(timeout=1800) for host in hosts]
    assert not any(host.returncode for host in hosts), texts
    return [json.loads(output.rpartition("FIGURES ")[2].splitlines()[0]) for output, _ in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:tiny")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    record: dict[str, Any] = {"model": Path(options.model).name, "steps": options.steps}
    with tempfile.TemporaryDirectory() as temporary, bucket_server("gs"):
        folder = Path(temporary)
        (folder / "runs").mkdir()
        for name in ("shared", "separate", "bucket"):
            place = "gs://bucket/runs" if name == "bucket" else str(folder / "runs")
            chosen = [f"model.path={options.model}", f"run.dir={place}", *options.overrides]
            first = trained(folder, name, chosen, steps=options.steps, separate=name == "separate")
            again = trained(folder, name, chosen, steps=options.steps + 1, separate=name == "separate")
            run = folder / ("runs/gs/bucket/runs" if name == "bucket" else "runs") / name
            found = record[name] = {
                "save_s": max(median(host["save_s"]) for host in first),
                "until_on_disk_s": max(host["finish_s"][-1] for host in first),
                "restore_s": max(host["restore_s"][-1] for host in again),
                "save_mib": [round(max(host["save_mib"]), 1) for host in first],
                "restore_mib": [round(max(host["restore_mib"]), 1) for host in again],
                "step_s": median(line["time/step_s"] for line in metrics_of(run)[2:]),
            }
            if name == "bucket":
                found["line_bytes_a_step"] = sum(first[0]["line_bytes"]) / options.steps
                found["bytes_a_checkpoint"] = sum(first[0]["checkpoint_bytes"]) / (options.steps // 2)
                found["longest_wait_of_a_step_s"] = max(first[0]["wait_s"])
            print(name, json.dumps(found), flush=True)
    if options.out:
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
