"""Tests the page about TPU VMs: a run started by its commands, entered as printed, outlives the VMs."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from app.tracking.bucket import MARKER, Bucket, complete_steps
from tests.program import CANARY, DEADLINE_S, REPOSITORY, UNJUDGED, free_address
from tests.scripts.conftest import Tpu, make_checkout
from tests.test_documents import bash_commands, words_and_environment
from tests.tracking.buckets import bucket_server
from tests.two_hosts import hosts_program

PAGE = (REPOSITORY / "sops" / "start" / "tpu_vm.md").read_text()
RUN = "gs://bucket/runs/first"
"""The run of the page, in the bucket of the test."""

# Installs the program of this repository instead of fetching packages; the home folder names the worker.
ENVIRONMENT = "make_environment() { mkdir -p .venv/bin; cp @CLOUD@/grpo .venv/bin/grpo; }\n"
GRPO = '#!/usr/bin/env bash\nPYTHONPATH=@REPOSITORY@ GRPO__MESH__PROCESS_ID=${HOME##*-} exec @PYTHON@ "$@"\n'
SHORT_LEASE = "from app.tracking import run_mirror\nrun_mirror.RENEW_S, run_mirror.LEASE_S = 1.0, 3.0\n"
HOSTS = ("mesh.platform=cpu", "mesh.cpu_devices=4", "mesh.num_processes=2")
LONGEST_S = 4 * DEADLINE_S
"""Longest time for a command, with the start of two processes."""
SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "checkpoint.every_steps=1", *UNJUDGED)


class Terminal:
    """A terminal in a checkout, in which a user enters commands of the page."""

    def __init__(self, tpu: Tpu):
        self.tpu = tpu
        self.checkout = make_checkout(tpu, ENVIRONMENT.replace("@CLOUD@", str(tpu.cloud)))
        option, program = hosts_program(heartbeat_s=10)
        python = shlex.join([sys.executable, option, SHORT_LEASE + program])
        grpo = GRPO.replace("@REPOSITORY@", shlex.quote(str(REPOSITORY))).replace("@PYTHON@", python)
        tpu.program("grpo", grpo, folder=tpu.cloud)
        (export,) = (line for line in commands("Once") if line.startswith("export "))
        self.exported = words_and_environment(export.removeprefix("export "))[1] | {"BUCKET": "bucket"}
        self.output = tpu.here / "output"

    @contextmanager
    def entered(self, command: str, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
        # Settings in environment variables override those of a command.
        pairs = (pair.split("=") for pair in (*HOSTS, f"mesh.coordinator_address={free_address()}", *SMALL, *overrides))
        settings = {f"GRPO__{name.upper().replace('.', '__')}": value for name, value in pairs}
        with self.output.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.checkout,
                env={**os.environ, **self.tpu.environment, **self.exported, **settings},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def run(self, command: str, *overrides: str) -> str:
        """Runs a command, which must succeed, and returns its output."""
        with self.entered(command, *overrides) as process:
            assert process.wait(timeout=LONGEST_S) == 0, self.output.read_text()
        return self.output.read_text()


def commands(section: str) -> list[str]:
    """Returns the commands of a section of the page."""
    return [*bash_commands(re.split(rf"^## {section}$", PAGE, flags=re.MULTILINE)[1].split("\n## ")[0])]


def newest_in_bucket() -> int:
    bucket = Bucket(RUN)
    return max(complete_steps(bucket, bucket.sizes()), default=0)


def log(terminal: Terminal, worker: int) -> str:
    """Returns what a worker printed in the newest launch."""
    newest = max((terminal.checkout / "launches").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    return (newest / f"worker_{worker}.log").read_text()


@pytest.mark.slow
@pytest.mark.two_hosts
@pytest.mark.timeout(1800)
def test_a_run_started_by_the_five_commands_continues_on_new_machines(tpu: Tpu) -> None:
    create, sync, setup, inspect, train = commands("Five commands")
    (delete,) = commands("After a preemption")
    terminal = Terminal(tpu)
    keys = terminal.checkout / ".env"
    keys.write_text(f"HF_TOKEN={CANARY}\n")
    keys.chmod(0o600)
    with bucket_server("gs"):
        for command in (create, sync, setup):
            terminal.run(command)
        terminal.run(inspect)
        first, second = (log(terminal, worker).partition("\nmesh ")[2] for worker in (0, 1))
        assert first == second and "\n1     2048-2051 " in first

        # The run has more steps than the test has time for.
        with terminal.entered(train, "run.steps=100000") as process:
            bucket, end = Bucket(RUN), time.monotonic() + LONGEST_S
            while not any(name.endswith(MARKER) for name in bucket.sizes()):
                assert process.poll() is None and time.monotonic() < end, terminal.output.read_text()
                time.sleep(0.1)
            tpu.set_state("PREEMPTED\t\n")
            group = tpu.running(0)
            assert group is not None
            os.killpg(group, signal.SIGKILL)
            assert process.wait(timeout=LONGEST_S) == 137, terminal.output.read_text()
        runs = [(tpu.home(worker) / "grpo" / "runs").exists() for worker in (0, 1)]
        assert runs == [True, False]

        step = newest_in_bucket()
        for command in (delete, create, sync, setup):
            terminal.run(command)
        output = terminal.run(train, f"run.steps={step + 1}")
        assert f"fetched from {RUN}: step {step}" in output
        assert f"continuing after step {step} of {step + 1}" in output
        assert newest_in_bucket() == step + 1
        steps = [json.loads(line)["step"] for line in Bucket(RUN).read("metrics.jsonl").splitlines()]
        assert steps == [*range(1, step + 2)]
