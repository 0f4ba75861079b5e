"""Tests that `grpo rollout` on two hosts writes the file of one host, and that an error on one host ends both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.program import here, of_tiny, records_of, settings, without_progress
from tests.two_hosts import HOSTS_PROGRAM, KEEPING, Programs, run_on_two_hosts

pytestmark = pytest.mark.two_hosts

OF_THE_SCHEDULE = ("elapsed_s", "worker", "segments")


def write_problems(path: Path, *, first: int, count: int) -> Path:
    lines = (json.dumps({"prompt": f"{a} + 30 = ?", "answer": str(a + 30)}) for a in range(first, first + count))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def arguments(model: Path, *, prompts_per_step: int) -> list[str]:
    return [
        "rollout",
        "--json",
        *settings(
            f"model.path={model}",
            "data.max_prompt_length=16",
            f"rollout.prompts_per_step={prompts_per_step}",
            "rollout.group_size=4",
            "rollout.max_new_tokens=4",
        ),
    ]


def test_two_hosts_write_the_file_that_one_would(tiny_model: Path, tmp_path: Path) -> None:
    # Rounds of four prompts; the last has three, one of which is the second host's.
    prompts = write_problems(tmp_path / "prompts.jsonl", first=1, count=11)
    chosen = ("--prompts", prompts, "--out")
    one = here(*arguments(tiny_model, prompts_per_step=4), *chosen, tmp_path / "one.jsonl")
    assert one.exit_code == 0, one.stderr
    first, second = run_on_two_hosts(*arguments(tiny_model, prompts_per_step=2), *chosen, tmp_path / "two.jsonl")
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert "{" not in second.stdout and "rollout" not in without_progress(second.stderr)
    summary, expected = json.loads(first.stdout[first.stdout.index("{") :]), json.loads(one.stdout)
    of_one = ("seconds", "tokens per second", "written to")
    assert {name: summary[name] for name in expected if name not in of_one} == {
        name: value for name, value in expected.items() if name not in of_one
    }
    found, expected = records_of(tmp_path / "two.jsonl"), records_of(tmp_path / "one.jsonl")
    assert len({record["worker"] for record in found}) == 2
    for record in (*found, *expected):
        for name in OF_THE_SCHEDULE:
            del record[name]
    # Bit for bit: every device has had the same rows.
    assert found == expected and len(found) == 44
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "one.jsonl", "two.jsonl"}


def test_two_hosts_with_workers_write_the_file_of_one_worker(tiny_model: Path, tmp_path: Path) -> None:
    prompts = write_problems(tmp_path / "prompts.jsonl", first=1, count=11)
    workers = ("rollout.scheduler=adaptive", "rollout.mode=exact", "model.dtype=float32")
    slots = ("rollout.workers.fast.slots=4", "rollout.workers.heavy.count=0")
    chosen = (*settings(*workers, *slots), "--prompts", prompts, "--out")
    # A device for each worker.
    counts = [settings(f"rollout.workers.fast.count={count}") for count in (8, 4)]
    one = here(*arguments(tiny_model, prompts_per_step=4), *counts[0], *chosen, tmp_path / "one.jsonl")
    assert one.exit_code == 0, one.stderr
    two = (*arguments(tiny_model, prompts_per_step=2), *counts[1], *chosen, tmp_path / "two.jsonl")
    first, second = run_on_two_hosts(*two, "--timeline", tmp_path / "timeline.html")
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    summary = json.loads(first.stdout[first.stdout.index("{") :])
    assert summary["samples"] == 44 and summary["scheduler"] == "adaptive" and "{" not in second.stdout
    found, expected = records_of(tmp_path / "two.jsonl"), records_of(tmp_path / "one.jsonl")
    # Of each round of four prompts, the second host has the last two; of the last round, which has three, the last.
    of_second = [record["worker"] for record in found if record["group_id"] % 4 >= 2]
    assert len(of_second) == 20 and set(of_second) == {f"host1/fast-{number}" for number in range(4)}
    for record in (*found, *expected):
        for name in OF_THE_SCHEDULE:
            del record[name]
    assert found == expected and len(found) == 44
    pictures = {f"timeline.host_{number}_of_2.html": f"host{number}/fast-0" for number in (0, 1)}
    assert all(worker in (tmp_path / name).read_text() for name, worker in pictures.items())
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "one.jsonl", "two.jsonl", *pictures}


FAULTY = """\
import threading
import cli
from app.rollout.engine.engine import SlotEngine
faultless, calls = SlotEngine.finish_segment, []
def faulty(*arguments):
    calls.append(arguments)
    if len(calls) == 2:
        {fault}
    return faultless(*arguments)
SlotEngine.finish_segment = faulty
cli.main()
"""
HANGS, FAILS = "threading.Event().wait()", "raise RuntimeError('broken')"


def second_faulty(fault: str) -> Programs:
    """Returns the command, and for the second host one whose second segment does this instead of ending."""
    return HOSTS_PROGRAM, ("-c", KEEPING + FAULTY.format(fault=fault))


def test_a_host_that_hangs_ends_both_and_writes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    prompts, out = write_problems(tmp_path / "prompts.jsonl", first=1, count=16), tmp_path / "out.jsonl"
    chosen = (*of_tiny(tiny_model), *settings("watchdog.phase_s=30"), "--prompts", prompts, "--out", out)
    hosts = run_on_two_hosts("rollout", *chosen, programs=second_faulty(HANGS))
    assert [host.exit_code for host in hosts] == [70, 70], hosts
    assert not out.exists()
    stacks = [(tmp_path / "out.jsonl.crash" / f"host_{number}.txt").read_text() for number in (0, 1)]
    for host, stack in zip(hosts, stacks, strict=True):
        assert "in phase rollout" in host.stderr
        assert "Thread 0x" in stack
    assert "in faulty" in stacks[1] and "in faulty" not in stacks[0]


def test_a_host_that_fails_ends_both_and_leaves_what_was_finished(tiny_model: Path, tmp_path: Path) -> None:
    prompts, out = write_problems(tmp_path / "prompts.jsonl", first=1, count=16), tmp_path / "out.jsonl"
    chosen = (*of_tiny(tiny_model), "--prompts", prompts, "--out", out)
    first, second = run_on_two_hosts("rollout", *chosen, programs=second_faulty(FAILS))
    assert (first.exit_code, second.exit_code) == (1, 1), first.stderr + second.stderr
    assert "host 1 has failed, so this host exits: broken" in first.stderr
    assert "error: RuntimeError: broken" in second.stderr
    parts = {f"out.jsonl.host_{number}_of_2.part" for number in (0, 1)}
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", *parts}
