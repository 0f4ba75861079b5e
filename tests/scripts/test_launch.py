"""Tests the launcher with real processes: start, stop, restart and exit codes."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.program import DEADLINE_S, wait_for
from tests.scripts.conftest import Tpu

SCRIPT = "launch_on_tpu_vm.sh"
QUICK = ("--settle", "0", "--wait", "0", "--grace", "5", "--logs", "logs")
WORKERS = (0, 1)

Launch = Callable[..., subprocess.CompletedProcess[str]]

# The name of the home folder ends with the number of the worker.
GRPO = """#!/usr/bin/env bash
echo "$*" >>"$HOME/calls"
attempt=$(wc -l <"$HOME/calls")
worker=${HOME##*-}
"""
SLEEP_UNTIL_TERM = "trap 'echo saved; exit 75' TERM\ntouch $HOME/ready\nsleep 60 & wait $!\n"


@pytest.fixture
def launch(tpu: Tpu) -> Launch:
    for worker in WORKERS:
        (tpu.home(worker) / "grpo").mkdir()

    def run(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return tpu.run(SCRIPT, *QUICK, *options, "--", *command)

    return run


def install_grpo(tpu: Tpu, text: str) -> None:
    for worker in WORKERS:
        tpu.program("grpo", GRPO + text, folder=tpu.home(worker) / "grpo" / ".venv" / "bin")


def log(tpu: Tpu, worker: int) -> str:
    return (tpu.here / "logs" / f"worker_{worker}.log").read_text()


def calls_of(tpu: Tpu, worker: int) -> list[str]:
    return (tpu.home(worker) / "calls").read_text().splitlines()


def test_launcher_runs_the_same_command_on_every_worker_and_keeps_its_log(tpu: Tpu, launch: Launch) -> None:
    done = launch("bash", "-c", "pwd", options=("--dry-run",))
    assert done.returncode == 0 and done.stdout.count("gcloud compute tpus tpu-vm ssh tpu-1 --worker=") == 2
    assert [call[3] for call in tpu.calls()] == ["describe"] and not (tpu.here / "logs").exists()
    done = launch("bash", "-c", "pwd; echo to-stderr >&2; printf last", options=("--show",))
    assert done.returncode == 0, done.stderr
    for worker in WORKERS:
        assert log(tpu, worker).splitlines()[1:] == [str(tpu.home(worker) / "grpo"), "to-stderr", "last"]
    assert "all workers ended well" in done.stderr
    assert {"[0] last", "[1] last"} <= {*done.stdout.splitlines()}
    workers = sorted(call[4:6] for call in tpu.calls() if call[3] == "ssh")
    assert workers == [["tpu-1", "--worker=0"], ["tpu-1", "--worker=1"]]


def test_launcher_passes_every_argument_unchanged(tpu: Tpu, launch: Launch) -> None:
    arguments = ["two words", "", "it's", 'a "b"', "$HOME `id` $(id)", "*", "a;b|c&d>e", "line\nline", "-x", "ü\\n"]
    install_grpo(tpu, 'printf \'%s\\0\' "$@" >"$HOME/arguments"\n')
    done = launch("grpo", *arguments)
    assert done.returncode == 0, done.stderr
    for worker in WORKERS:
        assert (tpu.home(worker) / "arguments").read_text().split("\0")[:-1] == arguments


def test_a_failed_worker_ends_the_other_workers(tpu: Tpu, launch: Launch) -> None:
    other_is_ready = f"while [ ! -e {tpu.home(0)}/ready ]; do sleep 0.05; done"
    install_grpo(tpu, f"[ $worker = 0 ] || {{ {other_is_ready}; exit 3; }}\n{SLEEP_UNTIL_TERM}")
    done = launch("grpo", "train")
    assert done.returncode == 3
    assert "stopping the others, since worker 1 ended with 3" in done.stderr
    assert "saved" in log(tpu, 0) and tpu.running(0) is None


def test_a_worker_that_ignores_sigterm_is_killed_with_its_children(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, "[ $worker = 0 ] || exit 1\ntrap '' TERM\nsleep 60 & echo $! >$HOME/child; wait; wait\n")
    done = launch("grpo", "train", options=("--grace", "1"))
    assert done.returncode == 1
    assert "worker 0 ended with 137 (killed)" in done.stderr
    child = int((tpu.home(0) / "child").read_text())
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])


def test_a_resumable_run_is_restarted_with_resume(tpu: Tpu, launch: Launch) -> None:
    """The causes are the watchdog, a preemption, the death of another host, a kill and a lost connection."""
    ends = ("exit 70", "exit 75", "kill -ABRT $$", "kill -KILL $$", "kill -TERM $$", "exit 0")
    cases = " ".join(f"{attempt}) {end} ;;" for attempt, end in enumerate(ends, 1))
    install_grpo(
        tpu,
        f"[ $worker.$attempt = 0.6 ] && exit 0\n[ $worker = 0 ] || case $attempt in {cases} esac\n{SLEEP_UNTIL_TERM}",
    )
    done = launch("grpo", "train", "--set", "run.steps=2", options=("--restarts", "5"))
    assert done.returncode == 0, done.stderr
    first = "train --set run.steps=2"
    assert [calls_of(tpu, worker) for worker in WORKERS] == [[first, *[f"{first} --resume auto"] * 5]] * 2
    for text in ("70 (watchdog)", "75 (stopped", "134 (lost another host)", "137 (killed)", "143 (ended by"):
        assert f"worker 1 ended with {text}" in done.stderr


def test_a_command_that_gcloud_repeats_after_a_lost_connection_runs_once(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, f"[ $attempt -gt 1 ] && exit 0\n{SLEEP_UNTIL_TERM}")
    (tpu.cloud / "break-1").touch()
    done = launch("grpo", "train", options=("--restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert "worker 1 ended with 76 (connection lost)" in done.stderr
    assert calls_of(tpu, 1) == ["train", "train --resume auto"]


@pytest.mark.parametrize(
    ("program", "command", "restarts", "code", "num_calls"),
    [
        ("exit 2\n", "train", "3", 2, 1),
        ("exit 75\n", "train --resume must", "1", 75, 2),
        ("printf 'PREEMPTED\\t\\n' >@CLOUD@/describe\nexit 75\n", "train", "5", 75, 1),
    ],
    ids=["error", "no restarts left", "TPU is gone"],
)
def test_a_run_that_cannot_continue_is_not_restarted(tpu, launch, program, command, restarts, code, num_calls):
    install_grpo(tpu, program.replace("@CLOUD@", str(tpu.cloud)))
    done = launch("grpo", *command.split(), options=("--restarts", restarts))
    assert done.returncode == code
    assert calls_of(tpu, 0) == [command] * num_calls


def test_a_run_is_not_restarted_after_an_error_that_also_ends_another_worker(tpu: Tpu, launch: Launch) -> None:
    tpu.environment["TMPDIR"] = str(tpu.here)
    has_failed = f"grep -qs '^0 1$' {tpu.here}/*/ended"
    install_grpo(tpu, f"[ $worker = 0 ] && exit 1\nuntil {has_failed}; do sleep 0.05; done\nkill -ABRT $$\n")
    done = launch("grpo", "train", options=("--restarts", "3", "--settle", "10"))
    assert done.returncode == 1
    assert "worker 0 ended with 1, worker 1 ended with 134 (lost another host)" in done.stderr
    assert len(calls_of(tpu, 1)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_launcher_forwards_a_signal_once_and_ends_the_job(tpu: Tpu, number: signal.Signals, code: int) -> None:
    name = number.name.removeprefix("SIG")
    trap = f"trap 'echo {name} >>$HOME/signals; exit {code}' TERM INT"
    install_grpo(tpu, f"{trap}\ntouch $HOME/ready\nsleep 60 & wait $!\n")
    with tpu.start(SCRIPT, *QUICK, "--restarts", "3", "--", "grpo", "train") as launcher:
        wait_for(lambda: all((tpu.home(worker) / "ready").exists() for worker in WORKERS))
        launcher.send_signal(number)
        _, stderr = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == code, stderr
    for worker in WORKERS:
        assert (tpu.home(worker) / "signals").read_text() == f"{name}\n"
        assert len(calls_of(tpu, worker)) == 1


def test_a_second_launch_does_not_disturb_the_first_and_stop_ends_it(tpu: Tpu) -> None:
    install_grpo(tpu, SLEEP_UNTIL_TERM)
    with tpu.start(SCRIPT, *QUICK, "--", "grpo", "train") as first:
        wait_for(lambda: all((tpu.home(worker) / "ready").exists() for worker in WORKERS))
        second = tpu.run(SCRIPT, *QUICK[:-2], "--logs", "logs-2", "--restarts", "3", "--", "grpo", "train")
        assert second.returncode == 2
        assert "still runs on this worker; end it with --stop" in (tpu.here / "logs-2" / "worker_0.log").read_text()
        assert tpu.running(0) is not None and first.poll() is None
        stopped = tpu.run(SCRIPT, "--grace", "5", "--stop")
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout.count("stopped by TERM") == 2
        first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 75
    assert tpu.run(SCRIPT, "--stop").stdout.count("nothing runs") == 2
