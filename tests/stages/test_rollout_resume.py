"""Tests that a killed `grpo rollout` continues from its part file, with the output of an uninterrupted one."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from app.checkpoint.saved_policy import read_policy_source
from app.records.identity import Identity
from app.records.partial_samples import PartFile, PartialSamples
from app.runtime.model_spec import read_model_spec
from app.stages.rollout import _read_prompts, rollout_identity
from settings import load
from tests.program import DEADLINE_S, NUM_DEVICES, digest_of, here, records_of, settings, started, wait_until

SMALL = ("data.max_prompt_length=16", "rollout.group_size=4", "rollout.max_new_tokens=48", "rollout.top_k=20")
SCHEDULED = (
    *("rollout.scheduler=adaptive", "rollout.mode=exact", "rollout.segment.min=1", "rollout.segment.max=2"),
    *("rollout.workers.fast.slots=4", "rollout.workers.heavy.slots=4", f"mesh.cpu_devices={NUM_DEVICES}"),
)
MODES = {"workers": SCHEDULED, "slots": ("rollout.slots=8", "rollout.mode=exact"), "defaults": ()}
SCHEDULE_FIELDS = ("worker", "segments", "elapsed_s")
"""Fields that depend on the schedule."""


def command(model: Path, out: Path, *overrides: str, limit: int = 16) -> list[str | Path]:
    chosen = settings(f"model.path={model}", *SMALL, *overrides)
    return ["rollout", *chosen, "--limit", str(limit), "--out", out]


def content(out: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name not in SCHEDULE_FIELDS} for one in records_of(out)]


def facts_of(model: Path, *overrides: str) -> Identity:
    chosen = load(None, [f"model.path={model}", "rollout.scheduler=adaptive", *overrides], {}).settings
    return rollout_identity(chosen, read_model_spec(chosen), [])


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """A folder with the part file of a scheduled rollout that was killed; tests must not change it."""
    folder = tmp_path_factory.mktemp("killed")
    part = folder / "samples.jsonl.part"
    with started(*command(tiny_model, folder / "samples.jsonl", *SCHEDULED)) as process:
        wait_until(process, lambda: part.exists() and part.read_bytes().count(b"\n") >= 9)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=DEADLINE_S)
    assert not (folder / "samples.jsonl").exists()
    return part


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """The output of the same rollout without a kill; tests must not change it."""
    out = tmp_path_factory.mktemp("undisturbed") / "samples.jsonl"
    result = here(*command(tiny_model, out, *SCHEDULED), "--timeline", out.with_name("slots.html"))
    assert result.exit_code == 0, result.stderr
    assert {path.name for path in out.parent.iterdir()} == {"samples.jsonl", "slots.html"}
    return out


def test_killed_half_way_it_writes_the_same_samples(
    tiny_model: Path, undisturbed: Path, killed: Path, tmp_path: Path
) -> None:
    out = tmp_path / "samples.jsonl"
    header, *lines = killed.read_bytes().splitlines(keepends=True)
    finished = [{**json.loads(line), "elapsed_s": 123.0} for line in lines if line.endswith(b"\n")]
    assert 8 <= len(finished) < 64
    # The last line is torn, as a kill in the middle of a write leaves it.
    stored = header + b"".join(json.dumps(one).encode() + b"\n" for one in finished) + lines[0][:50]
    (tmp_path / killed.name).write_bytes(stored)
    (tmp_path / ".samples.jsonl.4.partial").touch()
    result = here(*command(tiny_model, out, *SCHEDULED))
    assert result.exit_code == 0, result.stderr
    assert f"continuing: {len(finished)} of 64 samples are done" in result.stderr and "sampled before" in result.stdout
    assert content(out) == content(undisturbed)
    assert sum(record["elapsed_s"] == 123.0 for record in records_of(out)) == len(finished)
    assert {path.name for path in tmp_path.iterdir()} == {"samples.jsonl"}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_finished_is_not_drawn_again_in_any_mode(mode: str, tiny_model: Path, tmp_path: Path) -> None:
    out, whole = tmp_path / "samples.jsonl", tmp_path / "whole.jsonl"
    chosen = (*MODES[mode], "rollout.prompts_per_step=2")
    assert here(*command(tiny_model, whole, *chosen, limit=5)).exit_code == 0
    records = [{**record, "elapsed_s": 123.0} for record in records_of(whole)]
    header = header_of(tiny_model, *chosen, limit=5)
    # The last sample of the second prompt is missing, and the whole last prompt.
    stored = [record for i, record in enumerate(records) if i not in (7, 16, 17, 18, 19)]
    part = tmp_path / "samples.jsonl.part"
    part.write_text("".join(f"{line}\n" for line in (header, *map(json.dumps, stored))))
    result = here(*command(tiny_model, out, *chosen, limit=5), "--json")
    assert result.exit_code == 0, result.stderr
    assert content(out) == content(whole)
    kept = [record["elapsed_s"] == 123.0 for record in records_of(out)]
    assert kept == [i not in (7, 16, 17, 18, 19) for i in range(20)]
    assert not part.exists()
    # Killed before the part file was removed.
    part.write_text("".join(f"{line}\n" for line in (header, *map(json.dumps, records))))
    again = here(*command(tiny_model, out, *chosen, limit=5), "--json")
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout)["tokens per second"] == 0 and content(out) == content(whole)


def header_of(model: Path, *overrides: str, limit: int) -> str:
    """Returns the header of this rollout's part file."""
    chosen = load(None, [f"model.path={model}", *SMALL, *overrides], {}).settings
    spec = read_model_spec(chosen).without_adapters
    prompts, _ = _read_prompts(chosen, spec, None, limit=limit)
    return PartialSamples(Path(), rollout_identity(chosen, spec, prompts)).header


UNREAD = (
    *("rollout.max_staleness=2", "rollout.max_length_total=99", "rollout.kv_blocks=64"),
    *("rollout.ray.address=auto", "rollout.devices=0.5"),
    "eval.num_prompts=3",
    "reward.on_error=zero",
    "optimizer.learning_rate=0.1",
    "algorithm.beta=0.5",
    "run.steps=3",
)


def test_what_decides_no_sample_tells_no_runs_apart(tiny_model: Path) -> None:
    for mode, of_mode in (("exact", ()), ("fast", ("rollout.prompts_per_step=3", "rollout.workers.fast.slots=2"))):
        first = facts_of(tiny_model, f"rollout.mode={mode}", "rollout.ray.address=local")
        assert first == facts_of(tiny_model, f"rollout.mode={mode}", *UNREAD, *of_mode)
        assert first != facts_of(tiny_model, f"rollout.mode={mode}", "rollout.ray.address=local", "rollout.top_k=9")
        # Actors may round otherwise than this host's devices.
        assert (first == facts_of(tiny_model, f"rollout.mode={mode}")) == (mode == "fast")


@pytest.mark.parametrize(
    ("overrides", "limit", "message"),
    [
        (("rollout.temperature=0.5",), 16, "rollout.temperature was 1.0 there, and is 0.5 now."),
        (("run.seed=8",), 15, "the prompts was '16 prompts, "),
        (("rollout.workers.heavy.count=2",), 16, "rollout.workers.heavy.count was 1 there, and is 2 now"),
    ],
)
def test_a_part_file_of_another_rollout_is_left_as_it_is(
    tiny_model: Path, killed: Path, tmp_path: Path, overrides: tuple[str, ...], limit: int, message: str
) -> None:
    (tmp_path / killed.name).write_bytes(killed.read_bytes())
    before = digest_of(tmp_path)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl", *SCHEDULED, *overrides, limit=limit))
    assert result.exit_code == 2 and message in result.stderr and result.stderr.count("error: ") == 1
    assert "delete the file to start over, or give another --out" in result.stderr
    assert digest_of(tmp_path) == before


def test_a_part_file_of_another_checkpoint_is_left_as_it_is(finished: Path, tmp_path: Path) -> None:
    earlier, later = finished / "checkpoints" / "2", finished / "checkpoints" / "4"
    source = read_policy_source(load(str(finished / "settings.yaml"), [], {}).settings, earlier)
    prompts, _ = _read_prompts(source.settings, source.model, None, limit=4)
    part = tmp_path / "samples.jsonl.part"
    identity = rollout_identity(source.settings, source.model, prompts, source.saved_policy)
    part.write_text(PartialSamples(part, identity).header + "\n")
    result = here("rollout", "--checkpoint", later, "--limit", "4", "--out", tmp_path / "samples.jsonl")
    assert result.exit_code == 2 and "the checkpoint was 'step 2, " in result.stderr
    assert list(tmp_path.iterdir()) == [part]


@pytest.mark.parametrize("line", [b"half of a download", b"[]\n"])
def test_a_file_that_is_no_part_of_a_rollout_is_left_as_it_is(line: bytes, tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "samples.jsonl.part").write_bytes(line)
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
    assert result.exit_code == 2 and "samples.jsonl.part is not a part file of a rollout" in result.stderr
    assert (tmp_path / "samples.jsonl.part").read_bytes() == line


def test_two_processes_do_not_share_a_part_file(tiny_model: Path, tmp_path: Path) -> None:
    with PartFile(tmp_path / "samples.jsonl.part", header="{}"):
        result = here(*command(tiny_model, tmp_path / "samples.jsonl"))
        assert result.exit_code == 2 and "another process is running this rollout" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("overrides", [("rollout.workers.fast.count=99",), ("rollout.workers.heavy.slots=6",)])
def test_an_error_before_the_first_sample_leaves_no_file(
    tiny_model: Path, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    result = here(*command(tiny_model, tmp_path / "samples.jsonl", *SCHEDULED, *overrides))
    assert result.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_needs_a_schedule(tiny_model: Path, tmp_path: Path) -> None:
    result = here(*command(tiny_model, tmp_path / "samples.jsonl"), "--timeline", tmp_path / "slots.png")
    assert result.exit_code == 2 and "--timeline plots the activity of scheduled workers" in result.stderr
