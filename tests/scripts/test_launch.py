"""Tests of the launcher with real processes: start, stop, restart and exit codes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts.conftest import DEADLINE_S, Tpu

SCRIPT = "launch_on_tpu_vm.sh"
QUICK = ("--settle", "0", "--wait", "0", "--grace", "5", "--logs", "logs")

Launch = Callable[..., subprocess.CompletedProcess[str]]

# Which worker it is stands in the name of the home folder.
GRPO = """#!/usr/bin/env bash
echo "$*" >>"$HOME/calls"
attempt=$(wc -l <"$HOME/calls")
worker=${HOME##*-}
"""
SLEEP_UNTIL_TERM = "trap 'echo saved; exit 75' TERM\ntouch $HOME/ready\nsleep 60 & wait $!\n"


@pytest.fixture
def launch(tpu: Tpu) -> Launch:
    for worker in (0, 1):
        (tpu.home(worker) / "grpo").mkdir()

    def run(*command: str, options: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
        return tpu.run(SCRIPT, *QUICK, *options, "--", *command)

    return run


def install_grpo(tpu: Tpu, text: str) -> None:
    for worker in (0, 1):
        tpu.program("grpo", GRPO + text, folder=tpu.home(worker) / "grpo" / ".venv" / "bin")


def log(tpu: Tpu, worker: int) -> str:
    return (tpu.here / "logs" / f"worker_{worker}.log").read_text()


def calls_of(tpu: Tpu, worker: int) -> list[str]:
    return (tpu.home(worker) / "calls").read_text().splitlines()


def wait_for(condition: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, "what was waited for never came"
        time.sleep(0.02)


def test_the_same_command_runs_on_every_worker_with_a_log_of_each(tpu: Tpu, launch: Launch) -> None:
    done = launch("bash", "-c", "pwd; echo to-stderr >&2")
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        assert log(tpu, worker).splitlines()[1:] == [str(tpu.home(worker) / "grpo"), "to-stderr"]
    assert "all workers ended well" in done.stderr
    assert sorted(call[4:6] for call in tpu.calls() if call[3] == "ssh") == [
        ["tpu-1", "--worker=0"],
        ["tpu-1", "--worker=1"],
    ]


def test_every_argument_arrives_whole(tpu: Tpu, launch: Launch) -> None:
    arguments = ["two words", "", "it's", 'a "b"', "$HOME `id` $(id)", "*", "a;b|c&d>e", "line\nline", "-x", "ü\\n"]
    install_grpo(tpu, 'printf \'%s\\0\' "$@" >"$HOME/arguments"\n')
    done = launch("grpo", *arguments)
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        assert (tpu.home(worker) / "arguments").read_text().split("\0")[:-1] == arguments


def test_one_that_ends_badly_takes_the_others_with_it(tpu: Tpu, launch: Launch) -> None:
    other_is_ready = f"while [ ! -e {tpu.home(0)}/ready ]; do sleep 0.05; done"
    install_grpo(tpu, f"[ $worker = 0 ] || {{ {other_is_ready}; exit 3; }}\n{SLEEP_UNTIL_TERM}")
    done = launch("grpo", "train")
    assert done.returncode == 3
    assert "stopping the others, since worker 1 ended with 3" in done.stderr
    assert "saved" in log(tpu, 0)
    assert tpu.running(0) is None


def test_one_that_ignores_term_is_killed_after_the_grace_with_all_it_started(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, "[ $worker = 0 ] || exit 1\ntrap '' TERM\nsleep 60 & echo $! >$HOME/child; wait; wait\n")
    started = time.monotonic()
    done = launch("grpo", "train", options=("--grace", "1"))
    assert done.returncode == 1
    assert "worker 0 ended with 137 (killed)" in done.stderr
    assert time.monotonic() - started < 20
    child = int((tpu.home(0) / "child").read_text())
    wait_for(lambda: not Path(f"/proc/{child}").exists() or "Z" in Path(f"/proc/{child}/stat").read_text().split()[2])


def test_what_passes_is_started_again_from_the_newest_checkpoint(tpu: Tpu, launch: Launch) -> None:
    """The causes are the watchdog, preemptions, the death of another host and a kill."""
    ends = ("exit 70", "exit 75", "kill -ABRT $$", "kill -KILL $$", "kill -TERM $$", "exit 0")
    cases = " ".join(f"{attempt}) {end} ;;" for attempt, end in enumerate(ends, 1))
    install_grpo(
        tpu,
        f"[ $worker.$attempt = 0.6 ] && exit 0\n[ $worker = 0 ] || case $attempt in {cases} esac\n{SLEEP_UNTIL_TERM}",
    )
    done = launch("grpo", "train", "--set", "run.steps=2", options=("--restarts", "5"))
    assert done.returncode == 0, done.stderr
    for worker in (0, 1):
        first, *others = calls_of(tpu, worker)
        assert first == "train --set run.steps=2"
        assert others == ["train --set run.steps=2 --resume auto"] * 5
    messages = (
        "worker 1 ended with 70 (watchdog)",
        "75 (stopped",
        "134 (lost another host)",
        "137 (killed)",
        "143 (ended by",
    )
    assert [text for text in messages if text not in done.stderr] == []


def test_an_error_is_not_started_again(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, "exit 2\n")
    done = launch("grpo", "train", options=("--restarts", "3"))
    assert done.returncode == 2
    assert len(calls_of(tpu, 0)) == 1


def test_an_error_that_costs_another_worker_its_host_is_not_started_again(
    tpu: Tpu, launch: Launch, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    has_failed = f"grep -qs '^0 1$' {tmp_path}/*/ended"
    install_grpo(tpu, f"[ $worker = 0 ] && exit 1\nuntil {has_failed}; do sleep 0.05; done\nkill -ABRT $$\n")
    done = launch("grpo", "train", options=("--restarts", "3", "--settle", "10"))
    assert done.returncode == 1
    assert "worker 0 ended with 1, worker 1 ended with 134 (lost another host)" in done.stderr
    assert len(calls_of(tpu, 1)) == 1


def test_restarts_come_to_an_end(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, "exit 75\n")
    done = launch("grpo", "train", "--resume", "must", options=("--restarts", "1"))
    assert done.returncode == 75
    assert calls_of(tpu, 0) == ["train --resume must"] * 2


def test_a_tpu_that_is_gone_is_not_waited_for(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, f"printf 'PREEMPTED\\t\\n' >{tpu.cloud}/describe\nexit 75\n")
    done = launch("grpo", "train", options=("--restarts", "5"))
    assert done.returncode == 75
    assert "PREEMPTED, not READY" in done.stderr
    assert len(calls_of(tpu, 0)) == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_is_handed_on_once_and_ends_the_job(tpu: Tpu, number: signal.Signals, code: int) -> None:
    name = number.name.removeprefix("SIG")
    install_grpo(
        tpu, f"trap 'echo {name} >>$HOME/signals; exit {code}' TERM INT\ntouch $HOME/ready\nsleep 60 & wait $!\n"
    )
    with started(tpu, "--restarts", "3", "--", "grpo", "train") as launcher:
        wait_for(lambda: all((tpu.home(worker) / "ready").exists() for worker in (0, 1)))
        launcher.send_signal(number)
        _, stderr = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == code, stderr
    for worker in (0, 1):
        assert (tpu.home(worker) / "signals").read_text() == f"{name}\n"
        assert len(calls_of(tpu, worker)) == 1


def test_a_command_that_gcloud_repeats_after_a_lost_connection_runs_once(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, f"[ $attempt -gt 1 ] && exit 0\n{SLEEP_UNTIL_TERM}")
    (tpu.cloud / "break-1").touch()
    done = launch("grpo", "train", options=("--restarts", "1"))
    assert done.returncode == 0, done.stderr
    assert "worker 1 ended with 76 (connection lost)" in done.stderr
    assert calls_of(tpu, 1) == ["train", "train --resume auto"]


def test_a_launch_does_not_disturb_another_which_stop_ends(tpu: Tpu) -> None:
    install_grpo(tpu, SLEEP_UNTIL_TERM)
    with started(tpu, "--", "grpo", "train") as first:
        wait_for(lambda: all((tpu.home(worker) / "ready").exists() for worker in (0, 1)))
        second = tpu.run(SCRIPT, *QUICK[:-2], "--logs", "logs-2", "--restarts", "3", "--", "grpo", "train")
        assert second.returncode == 2
        assert "still runs on this worker; end it with --stop" in (tpu.here / "logs-2" / "worker_0.log").read_text()
        assert (tpu.running(0), first.poll()) != (None, None)
        stopped = tpu.run(SCRIPT, "--grace", "5", "--stop")
        assert stopped.returncode == 0, stopped.stderr
        assert stopped.stdout.count("stopped by TERM") == 2
        first.communicate(timeout=DEADLINE_S)
    assert first.returncode == 75
    assert tpu.run(SCRIPT, "--stop").stdout.count("nothing runs") == 2


def test_lines_are_shown_behind_their_workers_number(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, 'printf "one\\ntwo"\nexit $worker\n')
    done = launch("grpo", "rollout", options=("--show",))
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == ["[0] one", "[0] two", "[1] one", "[1] two"]
    assert log(tpu, 1).endswith("one\ntwo")


def test_a_dry_run_prints_the_calls_and_starts_nothing(tpu: Tpu, launch: Launch) -> None:
    install_grpo(tpu, "")
    done = launch("grpo", "train", options=("--dry-run",))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("gcloud compute tpus tpu-vm ssh tpu-1 --worker=") == 2
    assert tpu.subcommands() == ["describe"]
    assert not (tpu.here / "logs").exists()


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((), "nothing to run"),
        (("--",), "nothing to run"),
        (("grpo", "train"), "unknown argument grpo; the command comes behind --"),
        (("--restarts", "-1", "--", "true"), "--restarts is -1; expected a whole number"),
        (("--grace", "soon", "--", "true"), "--grace is soon"),
        (("--restarts", "1", "--", "grpo", "train", "--resume", "never"), "exclude each other"),
        (("--restarts", "1", "--", "grpo", "train", "--resume=never"), "exclude each other"),
    ],
)
def test_an_unusable_launch_is_refused(tpu: Tpu, arguments: tuple[str, ...], complaint: str) -> None:
    done = tpu.run(SCRIPT, *arguments)
    assert (done.returncode, tpu.calls()) == (2, [])
    assert complaint in done.stderr


def started(tpu: Tpu, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        tpu.command(SCRIPT, *QUICK, *arguments),
        cwd=tpu.here,
        env={**tpu.environment, "LC_ALL": os.environ.get("LC_ALL", "C.UTF-8")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
