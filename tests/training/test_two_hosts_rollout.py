"""`grpo rollout` on two hosts writes the file that one host writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.training.program import here, records_of, settings
from tests.two_hosts import run_on_two_hosts

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
    assert "{" not in second.stdout and "rollout" not in second.stderr
    told, expected = json.loads(first.stdout[first.stdout.index("{") :]), json.loads(one.stdout)
    of_one = ("seconds", "tokens per second", "written to")
    assert {name: told[name] for name in expected if name not in of_one} == {
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


def test_other_prompts_on_one_host_stop_both_before_anything_is_sampled(tiny_model: Path, tmp_path: Path) -> None:
    files = [write_problems(tmp_path / f"{first}.jsonl", first=first, count=4) for first in (1, 2)]
    common = (*arguments(tiny_model, prompts_per_step=2), "--out", tmp_path / "out.jsonl")
    hosts = run_on_two_hosts(*common, of_each=(("--prompts", files[0]), ("--prompts", files[1])))
    for host in hosts:
        assert host.exit_code == 2, host
        assert "error: the prompts: the hosts differ" in host.stderr and "Traceback" not in host.stderr
    assert not (tmp_path / "out.jsonl").exists()


STUCK = """\
import sys, threading
import cli
from app.rollout.engine import Engine
generate, calls = Engine.generate, []
def generate_or_hang(engine, *arguments, **named):
    calls.append(engine)
    if "mesh.process_id=1" in sys.argv and len(calls) == 2:
        threading.Event().wait()
    return generate(engine, *arguments, **named)
Engine.generate = generate_or_hang
cli.main()
"""
"""The command, but that the second round of the second host does not end."""


def test_a_host_that_hangs_ends_both_and_writes_nothing(tiny_model: Path, tmp_path: Path) -> None:
    prompts, out = write_problems(tmp_path / "prompts.jsonl", first=1, count=8), tmp_path / "out.jsonl"
    chosen = ("--prompts", prompts, "--out", out, *settings("watchdog.compile_s=60", "watchdog.rollout_s=5"))
    hosts = run_on_two_hosts(*arguments(tiny_model, prompts_per_step=2), *chosen, program=("-c", STUCK))
    assert [host.exit_code for host in hosts] == [70, 70], hosts
    assert not out.exists()
    for number, host in enumerate(hosts):
        assert "in phase rollout" in host.stderr
        assert "Thread 0x" in (tmp_path / "out.jsonl.crash" / f"host_{number}.txt").read_text()
