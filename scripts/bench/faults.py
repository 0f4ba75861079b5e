"""Stops or kills one of two hosts at random moments of a run, and checks how both end and whether the run continues.

Two processes with virtual CPU devices train a tiny model. In each trial, one of them gets SIGTERM or is killed at a
random moment between the first file of the run and its end. Then the same command continues with `--resume auto`, and
some of these runs are compared bit for bit with an uninterrupted run. If both hosts have already ended well at that
moment, another moment is drawn; every other outcome is a trial. The logs of failed trials are printed.

During setup, SIGTERM ends a host at once, and the other host must end in time, as after a kill. Such trials are also
counted separately. Setup ends shortly before the settings of the run are written.

    python scripts/bench/faults.py [--trials 30] [--heartbeat 10] [--compare-every 3] [--separate] [--out FILE]

With --separate only process 0 sees the folder of the runs. The exit code is 1 if a trial failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from app.records.run_directory import RunDirectory  # noqa: E402
from tests.program import free_address  # noqa: E402

RESULTS = Path(__file__).resolve().parent / "results" / "faults.json"

LOG_CHARACTERS = 6000
"""Maximum number of characters from the end of each host's log that are printed for a failed trial."""
GRACE_S = 25.0
"""Seconds within which a host must save and end after SIGTERM."""
START_S = 300.0
"""Seconds within which a run must start or end, even on a busy machine."""
SETTINGS = (
    *("run.steps=12", "rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=12"),
    *("data.max_prompt_length=24", "eval.every_steps=4", "eval.num_prompts=4", "checkpoint.every_steps=3"),
    *("logging.report=false", "logging.completions_every_steps=0"),
)
LAST_STEP = 12
KINDS = {"SIGTERM": signal.SIGTERM, "kill -9": signal.SIGKILL}


@dataclass(frozen=True)
class Trial:
    kind: str
    host: int
    """Index of the host that gets the signal."""
    after_s: float
    """Seconds from the first file of the run to the signal."""
    seconds: float
    """Seconds from the signal to the end of both hosts."""
    codes: tuple[int, ...]
    step: int
    """Step of the newest complete checkpoint; -1 if there is none."""
    handled: bool
    """Whether the run's settings file existed at the signal, so that the program handled signals."""
    hung: bool
    ended_as_promised: bool
    went_on: bool
    equal: bool | None
    """Whether the resumed run equals an uninterrupted one; None if they were not compared."""

    @property
    def is_good(self) -> bool:
        return not self.hung and self.ended_as_promised and self.went_on and self.equal is not False


def started(folder: Path, name: str, heartbeat_s: int, *, separate: bool) -> list[subprocess.Popen[bytes]]:
    """Starts or resumes a run on both hosts; with `separate`, only process 0 sees its folder."""
    shared = (*SETTINGS, f"run.dir={folder / 'runs'}", f"run.name={name}", "mesh.num_processes=2")
    mesh = (f"mesh.coordinator_address={free_address()}", "mesh.cpu_devices=2")
    program = f"from app.distributed import shutdown; shutdown.HEARTBEAT_S = {heartbeat_s}; import cli; cli.main()"
    blind = f"from tests.two_hosts import hide; hide({str(folder / 'runs')!r}); {program}" if separate else program
    environment = {
        **os.environ,
        "PYTHONPATH": str(REPOSITORY),
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "true",
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    hosts = []
    for i in range(2):
        settings = [part for one in (*shared, *mesh, f"mesh.process_id={i}") for part in ("--set", one)]
        with (folder / f"{name}.host_{i}.log").open("ab") as log:
            hosts.append(
                subprocess.Popen(
                    [sys.executable, "-c", (program, blind)[i], "train", "--resume", "auto", *settings],
                    cwd=REPOSITORY,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return hosts


def wait(hosts: Sequence[subprocess.Popen[bytes]], seconds: float) -> bool:
    """Waits up to `seconds`, kills the processes that still run, and returns whether all had ended."""
    end = time.monotonic() + seconds
    with suppress(subprocess.TimeoutExpired):
        for host in hosts:
            host.wait(max(end - time.monotonic(), 0.0))
    left = [host for host in hosts if host.poll() is None]
    for host in left:
        os.killpg(host.pid, signal.SIGKILL)
        host.wait()
    return not left


def begun(run: Path, hosts: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Waits for the first file of the run; returns False if none appears in `START_S` or a host ends."""
    end = time.monotonic() + START_S
    while not (run / ".lock").exists():
        if time.monotonic() > end or any(host.poll() is not None for host in hosts):
            return False
        time.sleep(0.01)
    return True


def show_logs(folder: Path, name: str) -> None:
    for path in sorted(folder.glob(f"{name}.host_*.log")):
        print(f"--- {path.name}\n{path.read_text(errors='replace')[-LOG_CHARACTERS:]}", file=sys.stderr, flush=True)


def newest(run: Path) -> int:
    return max(RunDirectory(run).checkpoint_steps, default=-1)


def content(run: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """Returns the arrays of the last checkpoint, and the metrics without times and speeds."""
    from tests.program import metrics_of, reproducible, saved_state

    arrays = {name: array.tobytes() for name, array in saved_state(run, LAST_STEP).items()}
    return arrays, reproducible(metrics_of(run))


def as_promised(kind: str, victim: int, codes: tuple[int, ...], *, handled: bool, is_complete: bool) -> bool:
    """Returns whether the exit codes are allowed after this kind of signal.

    Args:
        victim: index of the host that got the signal.
        handled: see `Trial`.
        is_complete: whether the last step is saved.
    """
    of_other = codes[1 - victim]
    if kind == "SIGTERM" and (handled or codes == (75, 75)):
        # After a signal in the last step, the run is complete, or only its evaluation is missing. When everything is
        # written and the program is about to end, the signal is not handled any more.
        is_over = codes == (0, 0) or (codes[victim] == -signal.SIGTERM and of_other in (0, -signal.SIGABRT))
        return codes == (75, 75) or (is_complete and is_over)
    return codes[victim] == -KINDS[kind] and (of_other == -signal.SIGABRT or (is_complete and of_other == 0))


def tried(
    kind: str, number: int, *, folder: Path, span_s: float, heartbeat_s: int, separate: bool, compared: bool
) -> Trial | None:
    """Runs a trial and returns its result; None if both hosts had ended well before the signal."""
    name = f"{kind.replace(' ', '')}-{number}"
    run, victim = folder / "runs" / name, random.randrange(2)
    hosts = started(folder, name, heartbeat_s, separate=separate)
    has_begun = begun(run, hosts)
    after_s = random.uniform(0.0, span_s)
    if has_begun:
        time.sleep(after_s)
    was_alive = has_begun and hosts[victim].poll() is None
    handled = (run / "settings.yaml").exists()
    start = time.monotonic()
    if was_alive:
        os.kill(hosts[victim].pid, KINDS[kind])
    ended = wait(hosts, START_S)
    seconds = time.monotonic() - start
    codes, step = tuple(host.returncode for host in hosts), newest(run)
    if ended and codes == (0, 0) and not (was_alive and kind == "SIGTERM"):
        shutil.rmtree(run)
        return None
    bound_s = GRACE_S if kind == "SIGTERM" and handled else heartbeat_s + 10.0
    promised = as_promised(kind, victim, codes, handled=handled, is_complete=step == LAST_STEP)
    again = started(folder, name, heartbeat_s, separate=separate)
    went_on = wait(again, START_S) and [host.returncode for host in again] == [0, 0] and newest(run) == LAST_STEP
    found = Trial(
        kind,
        victim,
        round(after_s, 2),
        round(seconds, 2),
        codes,
        step,
        handled=handled,
        hung=not ended,
        ended_as_promised=was_alive and promised and seconds <= bound_s,
        went_on=went_on,
        equal=content(run) == content(folder / "runs" / "alone") if compared and went_on else None,
    )
    print(f"{name:<12} {json.dumps(asdict(found))}", flush=True)
    if not found.is_good:
        show_logs(folder, name)
    return found


def summary(trials: Sequence[Trial], kind: str) -> dict[str, Any]:
    of_kind = [trial for trial in trials if trial.kind == kind]
    compared = [trial for trial in of_kind if trial.equal is not None]
    return {
        "trials": len(of_kind),
        "before signals are handled": sum(not trial.handled for trial in of_kind),
        "as promised": sum(trial.ended_as_promised for trial in of_kind),
        "went on": sum(trial.went_on for trial in of_kind),
        "equal bit for bit": f"{sum(bool(trial.equal) for trial in compared)} of {len(compared)}",
        "hangs": sum(trial.hung for trial in of_kind),
        "median s": statistics.median(trial.seconds for trial in of_kind),
        "longest s": max(trial.seconds for trial in of_kind),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=30, help="of each kind")
    parser.add_argument("--heartbeat", type=int, default=10, help="seconds")
    parser.add_argument(
        "--compare-every", type=int, default=3, help="every how many trials one is compared with an uninterrupted run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--separate", action="store_true", help="only the first host sees the folder of the runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    random.seed(options.seed)
    trials: list[Trial] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "runs").mkdir()
        span_s = 0.0
        # The first run compiles; the second one shows how long a run without compilation takes.
        for name in ("compiling", "alone"):
            hosts = started(folder, name, options.heartbeat, separate=options.separate)
            has_begun, start = begun(folder / "runs" / name, hosts), time.monotonic()
            if not wait(hosts, START_S if has_begun else 0.0) or any(host.returncode for host in hosts):
                show_logs(folder, name)
                return 1
            span_s = time.monotonic() - start
        for number in range(options.trials):
            for kind in KINDS:
                compared = number % options.compare_every == 0
                arguments: dict[str, Any] = {
                    **{"folder": folder, "span_s": span_s},
                    **{"heartbeat_s": options.heartbeat, "separate": options.separate},
                }
                while (trial := tried(kind, number, compared=compared, **arguments)) is None:
                    pass
                trials.append(trial)
    rows = {kind: summary(trials, kind) for kind in KINDS}
    for name in rows["SIGTERM"]:
        print(f"{name:<28}" + "".join(f"{rows[kind][name]!s:>14}" for kind in KINDS))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True)
    record = {
        "date": datetime.now(UTC).date().isoformat(),
        "jax": metadata.version("jax"),
        "commit": commit.stdout.strip() or None,
        "heartbeat_s": options.heartbeat,
        "processes": 2,
        "devices per process": 2,
        "folder": "of the first process alone" if options.separate else "of both",
        "processors": os.cpu_count(),
        "seconds of a run left alone": round(span_s, 1),
        "kinds": rows,
        "trials": [asdict(trial) for trial in trials],
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(trial.is_good for trial in trials) else 1


if __name__ == "__main__":
    sys.exit(main())
