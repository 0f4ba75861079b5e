"""Tests that stages on two hosts write the file of one host, and that a host that hangs ends both."""

import json
from pathlib import Path

import numpy as np
import pytest

from app.records.jsonl import write_jsonl
from tests.program import here, of_tiny, records_of, settings, succeeded
from tests.two_hosts import HOSTS_PROGRAM, KEEPING, run_on_two_hosts

pytestmark = pytest.mark.two_hosts

OF_THE_SCHEDULE = ("elapsed_s", "worker", "segments")


def write_problems(path: Path, *, count: int) -> Path:
    lines = (json.dumps({"prompt": f"{a} + 30 = ?", "answer": str(a + 30)}) for a in range(1, 1 + count))
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def test_two_hosts_with_workers_write_the_samples_of_one_host(tiny_model: Path, tmp_path: Path) -> None:
    prompts = write_problems(tmp_path / "prompts.jsonl", count=11)
    workers = ("rollout.scheduler=adaptive", "rollout.mode=exact", "model.dtype=float32")
    slots = ("rollout.workers.fast.slots=4", "rollout.workers.heavy.count=0")
    lengths = ("data.max_prompt_length=16", "rollout.group_size=4", "rollout.max_new_tokens=4")
    chosen = ("rollout", "--json", *settings(f"model.path={tiny_model}", *lengths, *workers, *slots))
    # Each worker has a device; a round has four prompts, of which the second host has the last two.
    of_one, of_two = (
        settings(f"rollout.workers.fast.count={count}", f"rollout.prompts_per_step={count // 2}") for count in (8, 4)
    )
    chosen = (*chosen, "--prompts", prompts)
    one = succeeded(here(*chosen, *of_one, "--out", tmp_path / "one.jsonl"))
    files = ("--out", tmp_path / "two.jsonl", "--timeline", tmp_path / "timeline.html")
    first, second = run_on_two_hosts(*chosen, *of_two, *files)
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    summary, expected = json.loads(first.stdout[first.stdout.index("{") :]), json.loads(one.stdout)
    for name in ("prompts", "samples", "completion tokens", "mean length", "truncated", "scheduler"):
        assert summary[name] == expected[name], name
    assert summary["hosts"] == 2 and summary["samples"] == 44 and "{" not in second.stdout
    found, expected = records_of(tmp_path / "two.jsonl"), records_of(tmp_path / "one.jsonl")
    of_second = [record["worker"] for record in found if record["group_id"] % 4 >= 2]
    assert len(of_second) == 20 and set(of_second) == {f"host1/fast-{number}" for number in range(4)}
    for record in (*found, *expected):
        for name in OF_THE_SCHEDULE:
            del record[name]
    assert found == expected
    pictures = {f"timeline.host_{number}_of_2.html": f"host{number}/fast-0" for number in (0, 1)}
    assert all(worker in (tmp_path / name).read_text() for name, worker in pictures.items())
    assert {path.name for path in tmp_path.iterdir()} == {"prompts.jsonl", "one.jsonl", "two.jsonl", *pictures}


HANGING = """\
import threading
import cli
from app.rollout.engine.engine import SlotEngine
finish, calls = SlotEngine.finish_segment, []
def hang_in_second(*arguments):
    calls.append(arguments)
    if len(calls) == 2:
        threading.Event().wait()
    return finish(*arguments)
SlotEngine.finish_segment = hang_in_second
cli.main()
"""


def test_a_host_that_hangs_ends_both_hosts_and_nothing_is_written(tiny_model: Path, tmp_path: Path) -> None:
    prompts, out = write_problems(tmp_path / "prompts.jsonl", count=16), tmp_path / "out.jsonl"
    chosen = (*of_tiny(tiny_model), *settings("watchdog.phase_s=30"), "--prompts", prompts, "--out", out)
    hosts = run_on_two_hosts("rollout", *chosen, programs=(HOSTS_PROGRAM, ("-c", KEEPING + HANGING)))
    assert [host.exit_code for host in hosts] == [70, 70], hosts
    assert not out.exists()
    stacks = [(tmp_path / "out.jsonl.crash" / f"host_{number}.txt").read_text() for number in (0, 1)]
    for host, stack in zip(hosts, stacks, strict=True):
        assert "in phase rollout" in host.stderr
        assert "Thread 0x" in stack
    assert "in hang_in_second" in stacks[1] and "in hang_in_second" not in stacks[0]


def test_two_hosts_score_packed_rows_of_several_windows_like_one_host(
    sampled: Path, tiny_model: Path, tmp_path: Path
) -> None:
    # The second of two windows has 123 samples, which two hosts cannot divide evenly.
    records = [record | {"note": number} for number, record in enumerate(records_of(sampled) * 176)]
    write_jsonl(tmp_path / "many.jsonl", records[:4219])
    quota = settings("score.max_tokens_per_device=1024")
    arguments = ("score", *of_tiny(tiny_model), *quota, "--input", tmp_path / "many.jsonl", "--check-packing", "--json")
    one = succeeded(here(*arguments, "--out", tmp_path / "one.jsonl"))
    first, second = run_on_two_hosts(*arguments, "--out", tmp_path / "two.jsonl")
    assert (first.exit_code, second.exit_code) == (0, 0), first.stderr + second.stderr
    assert "{" not in second.stdout
    found, expected = json.loads(first.stdout[first.stdout.index("{") :]), json.loads(one.stdout)
    assert found.keys() == expected.keys()
    for name in ("samples", "tokens", "mean |logprob - behavior|"):
        assert found[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-7), name
    for record, other in zip(records_of(tmp_path / "two.jsonl"), records_of(tmp_path / "one.jsonl"), strict=True):
        np.testing.assert_allclose(record.pop("policy_logprobs"), other.pop("policy_logprobs"), rtol=1e-5, atol=1e-5)
        assert record == other
