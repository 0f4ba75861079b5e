"""Runs the program in this process or in another one, and reads the files of a run."""

import hashlib
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from typer.testing import CliRunner, Result

import cli
from app.checkpoint.train_progress import ProgressRecord
from app.records.jsonl import read_jsonl
from app.records.run_directory import RunDirectory

REPOSITORY = Path(__file__).resolve().parents[1]
DEADLINE_S = 120
"""Seconds after which a process counts as hanging; four times what any test needs."""

CANARY = "CANARY-0123456789abcdef0123456789abcdef"
"""A secret that no output or file may contain."""

THE_PROGRAM = ("-m", "cli")
"""Arguments of Python that run the program."""

NUM_DEVICES = 8
"""Number of devices of every process, as in this one, so that programs and results are the same."""

UNJUDGED = ("eval.every_steps=0", "checkpoint.best_metric=null")
"""Settings of a run without evaluations."""


def settings(*overrides: str) -> list[str]:
    return [argument for override in overrides for argument in ("--set", override)]


def here(*arguments: str | Path) -> Result:
    """Runs a command in this process; its stderr is without lines of progress, such as `[  0.3 s] reading FILE`."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="grpo")
    lines = result.stderr.splitlines(keepends=True)
    result.stderr_bytes = "".join(line for line in lines if not re.match(r"\[ *\d+\.\d s\] ", line)).encode()
    return result


def of_tiny(model: Path) -> list[str]:
    return settings(
        f"model.path={model}",
        "data.max_prompt_length=16",
        "rollout.prompts_per_step=4",
        "rollout.group_size=4",
        "rollout.max_new_tokens=4",
        "algorithm.max_tokens_per_device=4096",
    )


def run_of(config: Path) -> Path:
    return config.parent / "runs" / "tiny"


def records_of(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_jsonl(path)]


def without_clock(path: Path) -> list[dict[str, Any]]:
    return [{**record, "elapsed_s": 0} for record in records_of(path)]


def train_here(config: Path, *overrides: str, resume: str = "never", allow_changed: Sequence[str] = ()) -> Result:
    allowed = [word for name in allow_changed for word in ("--allow-changed", name)]
    return here("train", "--config", config, "--resume", resume, *allowed, *settings(*overrides))


def succeeded(result: Result) -> Result:
    assert result.exit_code == 0, result.stderr
    return result


@contextmanager
def limited_file_size(num_bytes: int) -> Iterator[None]:
    """Makes writes beyond this size of a file fail in this process, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def started(
    *arguments: str | Path,
    environ: dict[str, str] | None = None,
    cwd: Path = REPOSITORY,
    program: Sequence[str] = THE_PROGRAM,
) -> Iterator[subprocess.Popen[str]]:
    """Runs a command, or arguments of Python, in another process, whose group does not outlive the block."""
    process = subprocess.Popen(
        [sys.executable, *program, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **(environ or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=DEADLINE_S)


def run_python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Runs Python with arguments in another process until it ends."""
    environ = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPOSITORY, env=environ, capture_output=True, text=True, timeout=DEADLINE_S
    )


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def wait_for_step(process: subprocess.Popen[str], run: Path, step: int) -> None:
    wait_until(process, lambda: any(line["step"] >= step for line in metrics_of(run)))


def wait_until(process: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    wait_for(lambda: happened() or process.poll() is not None)
    assert happened(), f"ended too early, with {process.returncode}: {process.communicate()}"


def wait_for(happened: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_S
    while not happened():
        assert time.monotonic() < end, f"it did not happen in {DEADLINE_S} s"
        time.sleep(0.005)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def reproducible(metrics: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the metrics that do not depend on clocks, schedules or compilation."""
    return [
        {name: value for name, value in line.items() if not name.startswith(("time/", "perf/"))} for line in metrics
    ]


def saved_state(run: Path, step: int) -> dict[str, np.ndarray]:
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        path = run / "checkpoints" / str(step) / "state"
        metadata = checkpointer.metadata(path).item_metadata.tree
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), metadata)
        tree = checkpointer.restore(path, restore_args=as_numpy)
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_state(run: Path, other: Path, *, step: int) -> None:
    state, expected = saved_state(run, step), saved_state(other, step)
    assert state.keys() == expected.keys()
    assert len(state) > 30
    for name in expected:
        np.testing.assert_array_equal(state[name], expected[name], err_msg=name)


def assert_same_run(run: Path, other: Path, *, step: int) -> None:
    assert_same_state(run, other, step=step)
    assert progress_of(run, step) == progress_of(other, step)
    metrics, expected = (reproducible(metrics_of(one)) for one in (run, other))
    assert metrics == [line for line in expected if line["step"] <= step]


def newest_checkpoint(run: Path) -> int:
    return max(RunDirectory(run).checkpoint_steps)


def copy_until(run: Path, copy: Path, *, step: int) -> Path:
    """Copies a run without the checkpoints after a step, as if it had been stopped soon after that step."""
    shutil.copytree(run, copy, symlinks=True)
    for later in RunDirectory(copy).checkpoint_steps:
        if later > step:
            shutil.rmtree(copy / "checkpoints" / str(later))
    return copy


def progress_of(run: Path, step: int) -> dict[str, Any]:
    record = ProgressRecord.read(run / "checkpoints" / str(step))
    return {**asdict(record.progress), "checksums": record.checksums}


def digest_of(folder: Path) -> dict[str, str]:
    """Returns content and time stamp of every file below a folder, which are equal if no file was touched."""
    return {
        str(path.relative_to(folder)): f"{path.stat().st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
