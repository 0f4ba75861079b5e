"""`grpo rollout --simulate`, run in this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import cli
from app.records.jsonl import write_jsonl
from app.rollout.scheduling import length_traces
from app.rollout.scheduling.event_log import EventRecord
from app.rollout.scheduling.events import Event, Submitted, WorkerJoined, WorkerLost
from app.rollout.scheduling.metrics import schedule_metrics
from app.stages.simulate import ORACLE, timeline_panel, worker_specs
from settings.schema.rollout import RolloutSettings
from tests.rollout.scheduling.driving import Driven, make_scheduler, samples

SMALL = ["--set", "rollout.workers.fast.slots=4", "--set", "rollout.workers.heavy.slots=4"]
POLICIES = ["sync", "pdsr_v1", "pdsr_v2", "adaptive", ORACLE]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    drawn = length_traces.log_normal(
        np.random.default_rng(0), prompts=8, group=4, mean=300, sigma=0.8, correlation=0.5, max_new=2048
    )
    write_jsonl(path, (one._asdict() for one in drawn))
    return path


def grpo(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["rollout", *arguments])


def test_all_policies_are_compared_as_a_table_json_and_a_picture(trace: Path, tmp_path: Path) -> None:
    out, picture = tmp_path / "found.json", tmp_path / "timeline.png"
    result = grpo("--simulate", str(trace), *SMALL, "--out", str(out), "--timeline", str(picture))
    assert result.exit_code == 0, result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[4:9]] == POLICIES
    found = json.loads(out.read_text())
    assert (found["samples"], found["prompts"]) == (32, 8)
    assert found["workers"] == {"fast-0": 4, "heavy-0": 4}
    by_name = {one["policy"]: one for one in found["policies"]}
    assert by_name["sync"]["faster_than_sync"] == 1.0
    assert by_name["adaptive"]["faster_than_sync"] > 1.2
    assert all(one["over_lower_bound"] >= 1 for one in found["policies"])
    assert {one["figures"]["useful_tokens"] for one in found["policies"]} == {found["tokens"]}
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_same_trace_gives_the_same_comparison(trace: Path) -> None:
    first, second = (grpo("--simulate", str(trace), "--json").stdout for _ in range(2))
    assert first == second


def test_the_cost_model_can_be_given(trace: Path, tmp_path: Path) -> None:
    cost = tmp_path / "cost.json"
    cost.write_text('{"step_s": 1.0, "step_row_s": 0, "step_cached_token_s": 0, "prefill_token_s": 0}')
    found = json.loads(grpo("--simulate", str(trace), "--cost", str(cost), "--json").stdout)
    longest, tokens, slots = found["longest"], found["tokens"], 16
    assert found["lower_bound_s"] == pytest.approx(max(longest, tokens / slots))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--timeline", "a.png", "--out", "o.jsonl"], "--timeline draws what scheduled workers do"),
        (["--cost", "a.json", "--out", "o.jsonl"], "--cost goes with --simulate"),
        (["--simulate", "TRACE", "--limit", "3"], "--limit goes without --simulate"),
        (["--simulate", "TRACE", "--timeline", "a.pdf"], "expected a name that ends in .png, .svg or .html, got a.pdf"),
        (["--simulate", "TRACE", "--cost", "absent.json"], "cannot be read: No such file"),
        (["--simulate", "TRACE", "--cost", cli.__file__], "not JSON"),
        (["--simulate", "TRACE", "--out", "TRACE"], "--simulate and --out both name"),
        (["--simulate", "TRACE", "--cost", "a.html", "--timeline", "./a.html"], "--cost and --timeline both name"),
        (["--out", "a.html", "--timeline", "a.html"], "--out and --timeline both name a.html; give each a file"),
        (["--out", "o.jsonl", "--log", "no/../o.jsonl"], "--out and --log both name"),
        (["--out", "TRACE", "--prompts", "TRACE"], "--prompts and --out both name"),
        (["--simulate", "absent.jsonl"], "no such file"),
        (["--simulate", "TRACE", "--set", "rollout.segment.min=5000"], "rollout.segment.min = 5000"),
    ],
)
def test_bad_input_is_one_clear_error(trace: Path, arguments: list[str], message: str) -> None:
    before = trace.read_bytes()
    result = grpo(*(str(trace) if argument == "TRACE" else argument for argument in arguments))
    assert result.exit_code == 2 and trace.read_bytes() == before
    assert message in result.stderr and result.stderr.count("error: ") == 1


def test_simulated_workers_are_those_of_the_settings(trace: Path) -> None:
    rollout = RolloutSettings(max_new_tokens=48, prefill_length_min=64, prompts_per_step=2)
    specs = worker_specs(rollout, max_prompt_length=128)
    assert [(one.name, one.device) for one in specs] == [("fast-0", None), ("heavy-0", None)]
    assert specs[0].program_sizes is not None and specs[0].program_sizes.prompt == (64, 128)
    found = [
        json.loads(grpo("--simulate", str(trace), *SMALL, "--set", f"mesh.cpu_devices={count}", "--json").stdout)
        for count in (1, 2)
    ]
    in_turn, side_by_side = ({one["policy"]: one["figures"]["makespan_s"] for one in run["policies"]} for run in found)
    assert in_turn["adaptive"] > 1.3 * side_by_side["adaptive"]


def test_a_picture_begins_with_the_first_submission_and_shows_workers_that_are_gone() -> None:
    driven = Driven(make_scheduler())
    records = []

    def tell(event: Event) -> None:
        records.append(EventRecord(event, tuple(driven.tell(event))))

    tell(WorkerJoined(5.0, "a", "fast", 1))
    tell(Submitted(7.0, samples(1, 1)))
    driven.at = 7.0
    tell(driven.ended("a", {"p0/s0": 4}, seconds=2.0))
    tell(WorkerLost(9.0, "a", "the process ended"))
    tell(WorkerJoined(9.0, "b", "fast", 2))
    tell(driven.ended("b", {"p0/s0": 8}, finished=("p0/s0",), seconds=3.0))
    drawn = timeline_panel("adaptive", records, schedule_metrics(records), None)
    assert drawn.slots == (("a", 1), ("b", 2)) and drawn.makespan_s == 5
    assert [(bar.worker, bar.start_s, bar.end_s) for bar in drawn.bars] == [("a", 0, 2), ("b", 2, 3.5)]


def test_simulating_never_imports_jax() -> None:
    program = "import sys, app.stages.simulate; print([name for name in ('jax', 'flax') if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
