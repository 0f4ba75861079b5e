"""A scheduled `grpo rollout` that is killed goes on from its log, as if it had not been."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from app.rollout.scheduling.event_log import EventLog, RunIdentity, read_event_log
from app.rollout.scheduling.events import RowReport, SegmentEnded, Submitted, WorkerJoined
from app.runtime.model_spec import read_model_spec
from app.stages.rollout_resume import PreviousProgress, rollout_facts
from settings import load
from tests.program import DEADLINE_S, NUM_DEVICES, digest_of, here, records_of, settings, started, wait_until
from tests.rollout.scheduling.driving import make_scheduler, samples

SMALL = ("data.max_prompt_length=16", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.top_k=20")
SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.mode=exact", "rollout.segment.min=1", "rollout.segment.max=2"),
    *("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4", f"mesh.cpu_devices={NUM_DEVICES}"),
)
VARIES = ("worker", "segments", "elapsed_s")
"""Fields that tell of the way a sample took."""


def command(model: Path, out: Path, *overrides: str, limit: int = 16) -> list[str | Path]:
    chosen = settings(f"model.path={model}", *SMALL, *SCHEDULED, *overrides)
    return ["rollout", *chosen, "--limit", str(limit), "--out", out]


def content(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name not in VARIES} for one in records_of(out)]


def num_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the output of a rollout that nobody killed, and its log. Not to be written to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    result = here(*command(tiny_model, folder / "samples.jsonl"), "--log", folder / "events.jsonl")
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in folder.iterdir()} == {"samples.jsonl", "events.jsonl"}
    return folder


@pytest.mark.parametrize(
    ("left", "hosts"), [("samples.jsonl.host_1_of_2.log", "2 hosts"), ("samples.jsonl.host_0_of_4.log", "4 hosts")]
)
def test_what_other_hosts_left_unfinished_is_not_passed_over(
    tiny_model: Path, tmp_path: Path, left: str, hosts: str
) -> None:
    (tmp_path / left).touch()
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
    assert result.exit_code == 2, result.stderr
    assert f"--out: a rollout on {hosts} to {tmp_path / 'samples.jsonl'} was not finished" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == [left]


def test_killed_half_way_it_writes_the_same_samples(tiny_model: Path, undisturbed: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "samples.jsonl", tmp_path / "samples.jsonl.log"
    with started(*command(tiny_model, out)) as process:
        wait_until(process, lambda: num_lines(log) >= 30)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
    before = read_event_log(log)
    assert not out.exists() and not before.scheduler.is_finished
    result = here(*command(tiny_model, out), "--log", tmp_path / "events.jsonl", "--timeline", tmp_path / "slots.html")
    assert result.exit_code == 0, result.stderr
    assert f"going on from {log}: " in result.stderr and "sampled before" in result.stdout
    assert content(out) == content(undisturbed / "samples.jsonl")
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl", "events.jsonl", "slots.html"}
    assert "it was killed and went on" in (tmp_path / "slots.html").read_text()
    whole = read_event_log(tmp_path / "events.jsonl")
    assert whole.records[: len(before.records)] == before.records
    joined = [event.worker for event, _ in whole.records if isinstance(event, WorkerJoined)]
    assert joined == ["fast-0", "heavy-0", "fast-0#2", "heavy-0#2"]


def test_killed_before_the_log_was_removed_it_samples_nothing_again(
    tiny_model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    shutil.copy(undisturbed / "events.jsonl", tmp_path / "samples.jsonl.log")
    result = here(*command(tiny_model, out), "--json")
    assert result.exit_code == 0, result.stderr
    assert "64 of 64 samples done" in result.stderr
    assert json.loads(result.stdout)["tokens per second"] == 0
    assert content(out) == content(undisturbed / "samples.jsonl")


def test_a_dropped_sample_without_tokens_has_not_begun(tmp_path: Path) -> None:
    with EventLog(tmp_path / "log", identity={}) as log:
        scheduler = log.start_or_resume(make_scheduler()).scheduler
        scheduler.handle(WorkerJoined(0.0, "w", "fast", 2))
        scheduler.handle(Submitted(0.0, samples(1, 3)))
        rows = (RowReport("p0/s0", 1, 0, "dropped:non-finite logits"), RowReport("p0/s1", 1, 3, "stop"))
        scheduler.handle(SegmentEnded(1.0, "w", 1, rows, 1.0, 3))
        past = PreviousProgress.from_log(log)
    assert past is not None and (past.num_done, past.num_started, past.num_samples) == (2, 0, 3)


UNREAD = ("rollout.max_staleness=2", "rollout.max_length_total=99", "rollout.workers.lease_s=9", "eval.num_prompts=3")
REWARDED = ("reward.on_error=zero", "optimizer.learning_rate=0.1", "algorithm.beta=0.5", "run.steps=3")


def test_what_decides_no_sample_tells_no_runs_apart(tiny_model: Path) -> None:
    for mode, of_mode in (("exact", ()), ("fast", ("rollout.prompts_per_step=3", "rollout.workers.fast.slots=2"))):
        first = facts_of(tiny_model, f"rollout.mode={mode}")
        assert first == facts_of(tiny_model, f"rollout.mode={mode}", *UNREAD, *REWARDED, *of_mode)
        assert first != facts_of(tiny_model, f"rollout.mode={mode}", "rollout.top_k=9")


def facts_of(model: Path, *overrides: str) -> RunIdentity:
    chosen = load(None, [f"model.path={model}", "rollout.scheduler=adaptive", *overrides], {}).settings
    return rollout_facts(chosen, read_model_spec(chosen), [])


def cut_in_the_middle(log: bytes) -> bytes:
    lines = log.splitlines(keepends=True)
    return b"".join([*lines[:9], lines[9][:-20], b"\n", *lines[10:]])


@pytest.mark.parametrize(
    ("overrides", "limit", "message"),
    [
        (("rollout.temperature=0.5",), 16, "What differs: rollout.temperature (1.0 there, 0.5 here)."),
        (("run.seed=8",), 15, "What differs: the prompts, run.seed (0 there, 8 here)."),
        (("rollout.workers.heavy.count=2",), 16, "rollout.workers.heavy.count (1 there, 2 here)"),
    ],
)
def test_a_log_of_another_run_is_left_as_it_is(
    tiny_model: Path, undisturbed: Path, tmp_path: Path, overrides: tuple[str, ...], limit: int, message: str
) -> None:
    shutil.copy(undisturbed / "events.jsonl", tmp_path / "samples.jsonl.log")
    before = digest_of(tmp_path)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl", *overrides, limit=limit))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("error: ") == 1
    assert "delete the log to start over, or choose another --out" in result.stderr
    assert digest_of(tmp_path) == before


def test_a_damaged_log_is_left_as_it_is(tiny_model: Path, undisturbed: Path, tmp_path: Path) -> None:
    log = tmp_path / "samples.jsonl.log"
    log.write_bytes(cut_in_the_middle((undisturbed / "events.jsonl").read_bytes()))
    before = digest_of(tmp_path)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
    assert result.exit_code == 2 and f"{log}:10: not JSON" in result.stderr
    assert "the log is damaged: delete it to start the rollout over" in result.stderr
    assert digest_of(tmp_path) == before


def test_two_processes_do_not_share_a_log(tiny_model: Path, tmp_path: Path) -> None:
    with EventLog(tmp_path / "samples.jsonl.log", identity={}):
        result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
        assert result.exit_code == 2 and "another process is running this rollout" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overrides", [("rollout.workers.fast.devices=[99]",), ("rollout.workers.heavy.slots=6",)])
def test_an_error_before_the_first_sample_leaves_no_log(
    tiny_model: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    result = here(*command(tiny_model, tmp_path / "samples.jsonl", *overrides))
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_log_wants_a_schedule(tiny_model: Path, tmp_path: Path) -> None:
    files = ("--out", tmp_path / "samples.jsonl", "--log", tmp_path / "events.jsonl")
    result = here("rollout", *settings(f"model.path={tiny_model}", *SMALL), *files)
    assert result.exit_code == 2 and "--log keeps what scheduled workers do" in result.stderr


def test_log_and_samples_of_a_real_rollout_are_traces(undisturbed: Path, tmp_path: Path) -> None:
    found = []
    for name in ("events.jsonl", "samples.jsonl"):
        result = here("rollout", "--simulate", undisturbed / name, "--json")
        assert result.exit_code == 0, result.stderr
        found.append(json.loads(result.stdout))
    recorded = found[0].pop("recorded")
    assert found[1].pop("recorded") is None and found[0] == found[1]
    assert (found[0]["samples"], found[0]["prompts"]) == (64, 16)
    assert recorded["policy"] == "adaptive" and recorded["slots"] == {"fast-0": 4, "heavy-0": 4}
    assert recorded["figures"]["useful_tokens"] == found[0]["tokens"]
    text = here("rollout", "--simulate", undisturbed / "events.jsonl").stdout
    assert "recorded: adaptive took" in text and "events are answered as they were" in text


def test_the_log_of_an_unfinished_rollout_is_no_trace(undisturbed: Path, tmp_path: Path) -> None:
    half = tmp_path / "half.log"
    half.write_bytes(b"".join((undisturbed / "events.jsonl").read_bytes().splitlines(keepends=True)[:60]))
    result = here("rollout", "--simulate", half)
    assert result.exit_code == 2 and "of its 64 samples are done. Start that again" in result.stderr
