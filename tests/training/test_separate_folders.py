"""Tests runs on two hosts of which only the first has the run directory."""

import re
import subprocess
from pathlib import Path

import pytest

from tests import program
from tests.tracking.buckets import bucket_server
from tests.two_hosts import HOSTS_PROGRAM, blind_host, run_on_two_hosts

pytestmark = pytest.mark.two_hosts

HALF = ("rollout.prompts_per_step=2", "algorithm.mini_batch_prompts=1")
"""Half of the sizes per host, so that the step of two hosts equals the step of one host."""


# Process 0 holds all shards of the weights in one case and half of them in the other.
@pytest.mark.parametrize("shape", ["2,4,1", "1,8,1"])
def test_a_run_saved_only_on_process_0_equals_a_shared_run_and_resumes(config: Path, shape: str) -> None:
    runs = config.parent / "runs"
    runs.mkdir()
    in_pieces = "from app.checkpoint import array_pieces\narray_pieces.MAX_PIECE_BYTES = 1500\n"
    programs = ((python, in_pieces + code) for python, code in (HOSTS_PROGRAM, blind_host(runs)))
    blind = {"programs": tuple(programs)}
    shared = ("checkpoint.every_steps=1", "checkpoint.keep=9", f"mesh.shape={shape}")

    def train(name: str, steps: int, *options: str, **how: tuple) -> str:
        overrides = program.settings(*HALF, *shared, f"run.name={name}", f"run.steps={steps}")
        hosts = run_on_two_hosts("train", "--config", config, *options, *overrides, **how)
        assert [host.exit_code for host in hosts] == [0, 0], hosts
        return hosts[0].stderr

    assert f"run.dir: {runs / 'both'}: all hosts see it" in train("both", 3)
    assert f"run.dir: {runs / 'alone'}: not all hosts see it" in train("alone", 2, **blind)
    assert "continuing after step 2 of 3" in train("alone", 3, "--resume", "must", **blind)
    program.assert_same_run(runs / "alone", runs / "both", step=3)
    for path in (*(runs / "both" / "rollouts").iterdir(), *(runs / "both" / "eval").iterdir()):
        assert program.without_clock(runs / "alone" / path.parent.name / path.name) == program.without_clock(path)
    of_one = ("mesh.cpu_devices=8", "algorithm.mini_batch_prompts=2", *shared)
    result = program.train_here(config, *of_one, "run.name=alone", "run.steps=4", resume="must")
    assert "continuing after step 3 of 4" in program.succeeded(result).stderr


@pytest.mark.parametrize(("resume", "steps"), [("must", ()), ("auto", (3,))], ids=["alone", "different"])
def test_hosts_whose_folders_contain_different_runs_are_refused(
    config: Path, resume: str, steps: tuple[int, ...]
) -> None:
    runs, other = config.parent / "runs", config.parent / "other"
    runs.mkdir()
    for checkpoint in (other / "tiny" / "checkpoints" / "7", *(runs / "tiny" / "checkpoints" / f"{n}" for n in steps)):
        checkpoint.mkdir(parents=True)
    own, programs = ((), program.settings(f"run.dir={other}")), (HOSTS_PROGRAM, blind_host(runs))
    hosts = run_on_two_hosts("train", "--config", config, "--resume", resume, of_each=own, programs=programs)
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    assert f"run.dir: this host has a run in {other / 'tiny'} (newest checkpoint: step 7)" in hosts[1].stderr
    assert "on host 1 (" in hosts[0].stderr and not any(path.is_file() for path in runs.rglob("*"))


def test_a_host_that_cannot_store_copies_gives_one_error_on_all_hosts(config: Path) -> None:
    runs = config.parent / "runs"
    runs.mkdir()
    python, code = blind_host(runs)
    without_space = python, f"import tempfile; tempfile.tempdir = '/proc'\n{code}"
    hosts = run_on_two_hosts("train", "--config", config, programs=(HOSTS_PROGRAM, without_space))
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    assert "run.dir: this host does not see the folder of process 0, and cannot copy its files" in hosts[1].stderr
    assert "on host 1 (" in hosts[0].stderr and not any(runs.iterdir())


def test_a_folder_that_process_0_cannot_write_gives_one_error_on_all_hosts(config: Path) -> None:
    hosts = run_on_two_hosts("train", "--config", config, *program.settings("run.dir=/proc/runs"))
    assert [host.exit_code for host in hosts] == [2, 2], hosts
    errors = [[line for line in host.stderr.splitlines() if line.startswith("error: ")] for host in hosts]
    assert [len(lines) for lines in errors] == [1, 1] and "on host 0 (" in errors[1][0]
    assert all("run.dir: cannot write to /proc: " in lines[0] for lines in errors)


def test_a_disk_that_runs_full_gives_one_error_on_all_hosts(config: Path) -> None:
    runs = config.parent / "runs"
    runs.mkdir()
    # A checkpoint takes 200 KiB, and twice as much while it is written.
    mount = f"mount --make-rprivate / && mount -t tmpfs -o size=600k none {runs}"
    if subprocess.run(["unshare", "--mount", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("this user cannot mount a small disk")
    small = f"import ctypes, os; assert not ctypes.CDLL(None).unshare(0x20000) and not os.system({mount!r})\n"
    (python, code), files = HOSTS_PROGRAM, ("checkpoint.every_steps=1", "checkpoint.keep=9", "logging.report=true")
    written = program.settings(*HALF, *files, "logging.tensorboard=true")
    programs = (python, small + code), blind_host(runs)
    hosts = run_on_two_hosts("train", "--config", config, *written, programs=programs)
    assert [host.exit_code for host in hosts] == [1, 1], hosts
    text = rf"no space is left to write [^\n]* on the disk of {runs}/tiny; checkpoint \d is complete\. Free some space"
    assert len(re.findall(f"error: DiskFullError: {text}", hosts[0].stderr)) == 1, hosts
    assert re.search(f"host 0 has failed, so this host exits: {text}", hosts[1].stderr), hosts


def test_old_checkpoints_on_another_host_do_not_matter_to_a_run_in_a_bucket(config: Path) -> None:
    own = config.parent / "second"
    (own / "runs" / "gs" / "bucket" / "runs" / "tiny" / "checkpoints" / "7").mkdir(parents=True)
    elsewhere = "-c", f"import os; os.chdir({str(own)!r})\n{HOSTS_PROGRAM[1]}"
    overrides = program.settings(*HALF, *program.UNJUDGED, "run.dir=gs://bucket/runs", "run.steps=1")
    with bucket_server("gs"):
        options = {"programs": (HOSTS_PROGRAM, elsewhere), "cwd": config.parent}
        hosts = run_on_two_hosts("train", "--config", config, *overrides, **options)
    assert [host.exit_code for host in hosts] == [0, 0], hosts
